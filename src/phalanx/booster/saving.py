"""What a run is made of, told to `checkpoint`: weights and moments by logical name, settings and places as plain state.

Names: `model/<parameter>`, `buffer/<buffer>`, `optimizer/<parameter>/<moment>`, with the model's number in front where one booster
has several models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.anatomy.file_names import FileNames
from phalanx.booster.export_saved import form_of, save_configurations
from phalanx.booster.file_weights import fill_from_files
from phalanx.booster.optimizer import BoostedOptimizer
from phalanx.booster.training import Training
from phalanx.checkpoint import Saving, Share, load, require_all_ranks, save, save_beside
from phalanx.checkpoint.export import read_safetensors, write_safetensors
from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import CheckpointError, ConfigError
from phalanx.layout import Layout, Piece
from phalanx.log import get_logger
from phalanx.memory.assemble import assemble
from phalanx.memory.partition import clean_name

if TYPE_CHECKING:
    from phalanx.booster.booster import Booster


# -- whole runs --------------------------------------------------------------------------------------------------------


def save_run(booster: Booster, path: Path) -> None:
    share = _share(booster)
    save(path, share.pieces, share.state, share.local_state, booster.mesh.world)


def save_run_beside(booster: Booster, path: Path, then: Callable[[], object]) -> Saving:
    if booster.plan.gemini:
        found = "under gemini memory is budgeted, and a copy of the state that is written beside the steps is in no budget"
        raise ConfigError(f"booster.save({str(path)!r}, wait=False): {found}", allowed="wait=True", remedy=f"booster.save({str(path)!r})")
    return save_beside(path, _share(booster), booster.mesh.world, then)


def _share(booster: Booster) -> Share:
    """What this rank has of the run. Collective."""
    require_all_ranks(booster.mesh.world, "booster.save")
    _require_between_steps(booster)
    pieces: list[Piece] = []
    step = max((training.num_steps + training.skipped_total for training in booster.trainings), default=0)
    state: dict[str, Any] = {"plan": str(booster.plan), "step": step, "models": []}
    state["loaders"] = [loader.state_dict() for loader in booster.loaders]
    for number, training in enumerate(booster.trainings):
        prefix = f"{number}/" if number else ""
        pieces += weight_pieces(training, prefix)
        pieces += moment_pieces(training, prefix)
        state["models"].append(_training_state(training))
    return Share(pieces, state, {"streams": booster.streams.state_dict(), "torch": torch.get_rng_state()})


def _require_between_steps(booster: Booster) -> None:
    """Gradients are no part of a checkpoint, so those of a step that is not done yet would be lost without a word."""
    mine = any(training.num_backwards for training in booster.trainings)
    if any(comm.gather_objects(mine, booster.mesh.world)):
        raise ConfigError(
            "booster.save was called between a backward and its step, whose gradients a checkpoint does not hold",
            allowed="booster.save after optimizer.step() or optimizer.zero_grad()",
            remedy="optimizer.step() before booster.save(path)",
        )


def load_run(booster: Booster, path: Path) -> None:
    axis = booster.mesh.world
    require_all_ranks(axis, "booster.load")
    state = _peek_state(path, axis, "models")
    if len(state["models"]) != len(booster.trainings) or len(state["loaders"]) != len(booster.loaders):
        raise CheckpointError(
            f"{path} holds {len(state['models'])} models and {len(state['loaders'])} loaders, "
            f"this run has {len(booster.trainings)} and {len(booster.loaders)}",
            remedy="boost the same models, optimizers and loaders as the run that was saved",
        )
    for training, saved in zip(booster.trainings, state["models"]):
        _require_same_parts(training, saved, path)
    pieces: list[Piece] = []
    with ExitStack() as stack:
        for number, (training, saved) in enumerate(zip(booster.trainings, state["models"])):
            prefix = f"{number}/" if number else ""
            stack.enter_context(_fresh_moments(training, saved["optimizer"]))
            pieces += [*weight_pieces(training, prefix), *moment_pieces(training, prefix)]
        state, local_state = load(path, pieces, axis)
    for training, saved in zip(booster.trainings, state["models"]):
        _restore_training(training, saved)
    for loader, saved in zip(booster.loaders, state["loaders"]):
        loader.load_state_dict(saved)
    if local_state is not None:
        booster.streams.load_state_dict(local_state["streams"])
        torch.set_rng_state(local_state["torch"])
        return
    booster.streams.load_state_dict({"seed": booster.seed, "streams": {}})
    if axis.index == 0:
        get_logger().warning(f"{path} was saved by another number of ranks: random streams (dropout) start anew from the seed")


def _peek_state(path: Path, axis: Axis, part: str) -> dict[str, Any]:
    """The shared state alone, which says what moments there are to be filled.

    Raises: CheckpointError where it does not hold `part`: it was saved by another call.
    """
    state = load(path, [], axis, strict=False)[0]
    if part not in state:
        allowed = "booster.load for what booster.save wrote, booster.load_optimizer for what booster.save_optimizer wrote"
        raise CheckpointError(f"{path} holds no {part} but {', '.join(sorted(state)) or 'nothing'}", allowed=allowed)
    return state


def _training_state(training: Training) -> dict[str, Any]:
    scheduler = training.scheduler.inner.state_dict() if training.scheduler else None
    return {
        "optimizer": _optimizer_state(training),
        "scheduler": scheduler,
        "scale": training.scale.state_dict(),
        "scale_is_fitted": training.scale_is_fitted,
        "num_steps": training.num_steps,
        "skipped_total": training.skipped_total,
        "form": form_of(training.model, _class_of(training.model).__name__, training.model_names.dtypes),
    }


def _require_same_parts(training: Training, saved: dict[str, Any], path: Path) -> None:
    _require_same_optimizer(training, saved["optimizer"], path)
    if (saved["scheduler"] is None) != (training.scheduler is None):
        found = "a scheduler" if saved["scheduler"] is not None else "no scheduler"
        raise CheckpointError(f"{path} holds {found} and this run is the other way round", remedy="give boost what the saved run had")


def _restore_training(training: Training, saved: dict[str, Any]) -> None:
    _restore_settings(training, saved["optimizer"])
    if training.scheduler is not None:
        training.scheduler.inner.load_state_dict(saved["scheduler"])
    training.scale.load_state_dict(saved["scale"])
    training.scale_is_fitted = saved["scale_is_fitted"]
    training.num_steps, training.skipped_total = saved["num_steps"], saved["skipped_total"]
    training.clear()
    training.engine.publish_all()


# -- weights -----------------------------------------------------------------------------------------------------------


def weight_pieces(training: Training, prefix: str) -> Iterator[Piece]:
    """This rank's part of every parameter, and every buffer that its part of the model has."""
    yield from training.engine.pieces(f"{prefix}model/")
    yield from _buffer_pieces(training, f"{prefix}buffer/")


def _buffer_pieces(training: Training, prefix: str) -> Iterator[Piece]:
    """The buffers of the modules that run here: under a pipeline only their stage knows what became of them."""
    for module, name, buffer in _buffers(training.model):
        if training.runs(module):
            # The buffer itself or a view of it, so that loading fills it; scalars become one element.
            tensor = buffer.view(-1) if buffer.is_contiguous() else buffer
            yield Piece(f"{prefix}{name}", tensor, Layout.whole(buffer.shape), owned=training.engine.is_first)


def _full_buffers(training: Training) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, buffer) of the whole model; what runs here is shown as it is here. Collective."""
    return assemble(_buffer_pieces(training, ""), training.world, training.engine.device)


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The persistent buffers, with the module that has them."""
    persistent = {
        (id(module), name) for module in model.modules() for name in module._buffers if name not in module._non_persistent_buffers_set
    }
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and (id(module), name) in persistent:
                yield module, clean_name(f"{module_name}.{name}" if module_name else name), buffer


def full_state_dict(training: Training) -> dict[str, torch.Tensor]:
    """Full weights in master dtype and buffers, under every name the model has for them."""
    full = {name: value.detach().clone() for name, value in training.engine.full_masters()}
    for alias, name in training.model_names.aliases.items():
        if name in full:
            full.setdefault(alias, full[name])
    full.update(_full_buffers(training))
    return full


def save_model(training: Training, path: Path, format: str, axis: Axis) -> None:
    """Writes weights in the dtype the person's model has, ties once, with the model's own configuration where it has one."""
    if format != "huggingface":
        raise ConfigError(f"format {format!r}", allowed='"huggingface"', remedy='format="huggingface"')
    require_all_ranks(axis, "booster.save_model")
    writes = axis.index == 0
    failure: Exception | None = None
    weights = _export_weights(training)
    try:
        if writes:
            write_safetensors(path, weights)
            save_configurations(training.model, _class_of(training.model).__name__, path)
    except (CheckpointError, OSError) as error:
        failure = error
    for _ in weights:  # the gathers are collective: every rank goes through all of them
        pass
    failed = [message for message in comm.gather_objects(str(failure) if failure else None, axis) if message]
    if failed:
        raise CheckpointError(failed[0].rstrip(".")) from failure


def _export_weights(training: Training) -> Iterator[tuple[str, torch.Tensor]]:
    dtypes, names = training.model_names.dtypes, FileNames(training.model)
    for name, value in training.engine.full_masters():
        yield from names.to_files(name, value.detach().to("cpu", dtypes[name], copy=True)).items()
    for name, buffer in _full_buffers(training):
        yield from names.to_files(name, buffer.to("cpu")).items()


def _class_of(model: nn.Module) -> type:
    """The person's class; `fully_shard` puts a class of PyTorch's own before it."""
    return next((kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.")), type(model))


def load_model(training: Training, path: Path, axis: Axis) -> None:
    """Fills masters and buffers from a safetensors directory; the model shows them at once.

    Raises: CheckpointError where a name is missing, left over, or has another shape.
    """
    require_all_ranks(axis, "booster.load_model")
    pieces = [Piece(piece.name.split("/", 1)[1], piece.tensor, piece.layout) for piece in weight_pieces(training, "")]
    names = FileNames(training.model)
    with read_safetensors(path) as weights:
        sources, buffers = names.sources(weights), {name for _, name, _ in _buffers(training.model)}
        left_over = sorted(set(sources) - set(training.names) - buffers - set(training.model_names.aliases))
        missing = sorted(name for name in training.names if name not in sources)
        if left_over or missing:
            found = f"missing {missing[0]}" if missing else f"the model has no {left_over[0]}"
            raise CheckpointError(f"{path} does not fit the model: {found}", allowed="exactly the model's names")
        with torch.no_grad():
            for piece in pieces:
                fill_from_files(piece, sources[piece.name], names, weights)
    training.engine.publish_all()


# -- optimizers --------------------------------------------------------------------------------------------------------


def moment_pieces(training: Training, prefix: str) -> Iterator[Piece]:
    """This rank's part of every tensor in the optimizer's state; scalars (step counts) go with its first element."""
    if training.optimizer is None:
        return
    engine = training.engine
    for chunk, slot in engine.shards():
        layout, owns = chunk.layout(slot), engine.owns(chunk, slot)
        for key, value in sorted(training.optimizer.state.get(slot.shard, {}).items()):
            if not isinstance(value, torch.Tensor):
                continue
            name = f"{prefix}optimizer/{slot.name}/{key}"
            if value.shape == slot.shard.shape:
                yield Piece(name, value.reshape(-1), layout, owned=owns)
            else:
                yield Piece(name, value.reshape(-1), Layout.whole(value.shape), owned=owns and layout.has_first)


def _moment_kinds(training: Training) -> dict[str, Any]:
    """For each parameter its moments: name -> [is elementwise, shape, dtype], or a plain value. The same on all ranks."""
    assert training.optimizer is not None
    mine: dict[str, Any] = {}
    for _, slot in training.engine.shards():
        entries: dict[str, Any] = {}
        for key, value in sorted(training.optimizer.state.get(slot.shard, {}).items()):
            if isinstance(value, torch.Tensor):
                elementwise = value.shape == slot.shard.shape
                entries[key] = {"elementwise": elementwise, "shape": None if elementwise else list(value.shape), "dtype": value.dtype}
            else:
                entries[key] = {"value": value}
        if entries:
            mine[slot.name] = entries
    merged: dict[str, Any] = {}
    for part in comm.gather_objects(mine, training.world):
        merged |= part
    return dict(sorted(merged.items()))


@contextmanager
def _fresh_moments(training: Training, saved: dict[str, Any] | None) -> Iterator[None]:
    """Gives the optimizer empty moments of the saved kinds, to be filled inside; its own come back where that fails."""
    if training.optimizer is None or saved is None:
        yield
        return
    state = training.optimizer.state
    before = dict(state)
    try:
        _make_moments(training, saved)
        yield
    except BaseException:
        state.clear()
        state.update(before)
        raise


def _make_moments(training: Training, saved: dict[str, Any]) -> None:
    assert training.optimizer is not None
    training.optimizer.state.clear()
    for _, slot in training.engine.shards():
        entries = saved["moments"].get(slot.name)
        if not entries:
            continue
        state = training.optimizer.state[slot.shard] = {}
        for key, kind in entries.items():
            if "value" in kind:
                state[key] = kind["value"]
            elif kind["elementwise"]:
                state[key] = torch.zeros_like(slot.shard.detach(), dtype=kind["dtype"])
            else:
                state[key] = torch.zeros(kind["shape"], dtype=kind["dtype"])


def _optimizer_state(training: Training) -> dict[str, Any] | None:
    """What is saved of an optimizer beside its tensors. Collective; the same on all ranks."""
    if training.optimizer is None:
        return None
    groups = zip(training.optimizer.param_groups, training.group_names)
    return {
        "kind": _kind(training.optimizer),
        "groups": [{"names": names, "settings": {k: v for k, v in group.items() if k != "params"}} for group, names in groups],
        "moments": _moment_kinds(training),
    }


def _kind(optimizer: BoostedOptimizer) -> str:
    """The class by name alone, so that a run goes on after its class has moved to another module."""
    return type(optimizer.inner).__qualname__


def _require_same_optimizer(training: Training, saved: dict[str, Any] | None, path: Path) -> None:
    """Raises: CheckpointError where the optimizer's kind, its groups or the parameters in them are not the saved ones."""
    theirs = None if saved is None else (saved["kind"], [group["names"] for group in saved["groups"]])
    mine = None if training.optimizer is None else (_kind(training.optimizer), training.group_names)
    if theirs == mine:
        return
    found = f"{path} holds {_describe(theirs)}, this run has {_describe(mine)}"
    if theirs and mine and _describe(theirs) == _describe(mine):
        pairs = zip(itertools.chain(*theirs[1]), itertools.chain(*mine[1]))
        found += ", where {} is in place of {}".format(*next((here, there) for there, here in pairs if there != here))
    raise CheckpointError(found, remedy="build the optimizer as in the run that was saved")


def _describe(optimizer: tuple[str, list[list[str]]] | None) -> str:
    if optimizer is None:
        return "no optimizer"
    kind, groups = optimizer
    return f"{kind} with {len(groups)} groups of {[len(group) for group in groups]} parameters"


def _restore_settings(training: Training, saved: dict[str, Any] | None) -> None:
    if training.optimizer is None or saved is None:
        return
    for group, other in zip(training.optimizer.param_groups, saved["groups"]):
        group.update(other["settings"])


def save_optimizer(training: Training, path: Path, axis: Axis) -> None:
    require_all_ranks(axis, "booster.save_optimizer")
    save(path, moment_pieces(training, ""), {"optimizer": _optimizer_state(training)}, {}, axis)


def load_optimizer(training: Training, path: Path, axis: Axis) -> None:
    require_all_ranks(axis, "booster.load_optimizer")
    saved = _peek_state(path, axis, "optimizer")["optimizer"]
    _require_same_optimizer(training, saved, path)
    with _fresh_moments(training, saved):
        load(path, moment_pieces(training, ""), axis)
    _restore_settings(training, saved)


def save_state(state: dict[str, Any], path: Path, axis: Axis) -> None:
    save(path, [], state, {}, axis)


def load_state(path: Path, axis: Axis) -> dict[str, Any]:
    return load(path, [], axis)[0]
