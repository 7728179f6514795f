"""What a run is made of, told to `checkpoint`: weights and moments by logical name, settings and places as plain state.

Names: `model/<parameter>`, `buffer/<buffer>`, `optimizer/<parameter>/<moment>`, with the model's number in front where one booster
has several models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.booster.training import Training
from phalanx.checkpoint import load, save
from phalanx.checkpoint.export import read_safetensors, write_safetensors
from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import CheckpointError, ConfigError
from phalanx.layout import Layout, Piece
from phalanx.log import get_logger
from phalanx.memory.partition import clean_name

if TYPE_CHECKING:
    from phalanx.booster.booster import Booster


# -- whole runs --------------------------------------------------------------------------------------------------------


def save_run(booster: Booster, path: Path) -> None:
    pieces: list[Piece] = []
    state: dict[str, Any] = {"plan": str(booster.plan), "models": [], "loaders": [loader.state_dict() for loader in booster.loaders]}
    for number, training in enumerate(booster.trainings):
        prefix = f"{number}/" if number else ""
        pieces += weight_pieces(training, prefix)
        pieces += moment_pieces(training, prefix)
        state["models"].append(_training_state(training))
    local_state = {"streams": booster.streams.state_dict(), "torch": torch.get_rng_state()}
    save(path, pieces, state, local_state, booster.mesh.world)


def load_run(booster: Booster, path: Path) -> None:
    axis = booster.mesh.world
    state = _peek_state(path, axis)
    if len(state["models"]) != len(booster.trainings) or len(state["loaders"]) != len(booster.loaders):
        raise CheckpointError(
            f"{path} holds {len(state['models'])} models and {len(state['loaders'])} loaders, "
            f"this run has {len(booster.trainings)} and {len(booster.loaders)}",
            remedy="boost the same models, optimizers and loaders as the run that was saved",
        )
    pieces: list[Piece] = []
    for number, (training, saved) in enumerate(zip(booster.trainings, state["models"])):
        prefix = f"{number}/" if number else ""
        _require_same_parts(training, saved, path)
        _make_moments(training, saved["moments"])
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


def _peek_state(path: Path, axis: Axis) -> dict[str, Any]:
    """The shared state alone, which says what moments there are to be filled."""
    return load(path, [], axis, strict=False)[0]


def _training_state(training: Training) -> dict[str, Any]:
    scheduler = training.scheduler.inner.state_dict() if training.scheduler else None
    return {
        "groups": _groups(training),
        "moments": _moment_kinds(training),
        "scheduler": scheduler,
        "scale": training.scale.state_dict(),
        "scale_is_fitted": training.scale_is_fitted,
        "num_steps": training.num_steps,
        "skipped_total": training.skipped_total,
    }


def _require_same_parts(training: Training, saved: dict[str, Any], path: Path) -> None:
    names = None if saved["groups"] is None else [group["names"] for group in saved["groups"]]
    have = training.group_names if training.optimizer else None
    if names != have:
        what = "no optimizer" if names is None else f"an optimizer with {len(names)} groups of {[len(group) for group in names]} parameters"
        mine = "none" if have is None else f"{len(have)} groups of {[len(group) for group in have]}"
        raise CheckpointError(f"{path} holds {what}, this run has {mine}", remedy="build the optimizer as in the run that was saved")
    if (saved["scheduler"] is None) != (training.scheduler is None):
        found = "a scheduler" if saved["scheduler"] is not None else "no scheduler"
        raise CheckpointError(f"{path} holds {found} and this run is the other way round", remedy="give boost what the saved run had")


def _restore_training(training: Training, saved: dict[str, Any]) -> None:
    if training.optimizer is not None:
        for group, settings in zip(training.optimizer.param_groups, saved["groups"]):
            group.update(settings["settings"])
    if training.scheduler is not None:
        training.scheduler.inner.load_state_dict(saved["scheduler"])
    training.scale.load_state_dict(saved["scale"])
    training.scale_is_fitted = saved["scale_is_fitted"]
    training.num_steps, training.skipped_total = saved["num_steps"], saved["skipped_total"]
    training.clear()
    training.engine.publish_all()


# -- weights -----------------------------------------------------------------------------------------------------------


def weight_pieces(training: Training, prefix: str) -> Iterator[Piece]:
    """This rank's part of every parameter, and every buffer."""
    engine = training.engine
    yield from engine.pieces(f"{prefix}model/")
    for name, buffer in _buffers(training.model):
        # A view of the buffer itself, so that loading fills it; scalars become one element.
        yield Piece(f"{prefix}buffer/{name}", buffer.reshape(-1), Layout.whole(buffer.shape), owned=engine.is_first)


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    persistent = {
        (id(module), name) for module in model.modules() for name in module._buffers if name not in module._non_persistent_buffers_set
    }
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and (id(module), name) in persistent:
                yield clean_name(f"{module_name}.{name}" if module_name else name), buffer


def full_state_dict(training: Training) -> dict[str, torch.Tensor]:
    """Full weights in master dtype and buffers, under every name the model has for them."""
    full = {name: value.detach().clone() for name, value in training.engine.full_masters()}
    names = {id(slot.parameter): slot.name for _, slot in training.engine.slots}
    for name, parameter in training.model.named_parameters(remove_duplicate=False):
        full.setdefault(clean_name(name), full[names[id(parameter)]])
    full.update((name, buffer.detach().clone()) for name, buffer in _buffers(training.model))
    return full


def save_model(training: Training, path: Path, format: str, axis: Axis) -> None:
    """Writes weights in the dtype the person's model has, ties once, with the model's own configuration where it has one."""
    if format != "huggingface":
        raise ConfigError(f"format {format!r}", allowed='"huggingface"', remedy='format="huggingface"')
    writes = axis.index == 0
    failure: Exception | None = None
    weights = _export_weights(training)
    try:
        if writes:
            write_safetensors(path, weights)
            _save_configuration(training.model, path)
    except (CheckpointError, OSError) as error:
        failure = error
    for _ in weights:  # the gathers are collective: every rank goes through all of them
        pass
    failed = [message for message in comm.gather_objects(str(failure) if failure else None, axis) if message]
    if failed:
        raise CheckpointError(failed[0].rstrip(".")) from failure


def _export_weights(training: Training) -> Iterator[tuple[str, torch.Tensor]]:
    dtypes = {slot.name: slot.dtype for _, slot in training.engine.slots}
    for name, value in training.engine.full_masters():
        yield name, value.detach().to("cpu", dtypes[name], copy=True)
    yield from _buffers(training.model)


def _save_configuration(model: nn.Module, path: Path) -> None:
    """The model's configurations; the first names the class that reads the model back."""
    for part in ("config", "generation_config"):
        configuration = getattr(model, part, None)
        if hasattr(configuration, "save_pretrained"):
            if part == "config":
                configuration.architectures = [_class_of(model).__name__]
            configuration.save_pretrained(path)


def _class_of(model: nn.Module) -> type:
    """The person's class; `fully_shard` puts a class of PyTorch's own before it."""
    return next((kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.")), type(model))


def load_model(training: Training, path: Path) -> None:
    """Fills masters and buffers from a safetensors directory; the model shows them at once.

    Raises: CheckpointError where a name is missing, left over, or has another shape.
    """
    pieces = [Piece(piece.name.split("/", 1)[1], piece.tensor, piece.layout) for piece in weight_pieces(training, "")]
    aliases = {clean_name(name) for name, _ in training.model.named_parameters(remove_duplicate=False)}
    with read_safetensors(path) as weights:
        left_over = sorted(set(weights) - {piece.name for piece in pieces} - aliases)
        known = {slot.name for _, slot in training.engine.slots}
        missing = sorted(name for name in known if name not in weights)
        if left_over or missing:
            found = f"missing {missing[0]}" if missing else f"the model has no {left_over[0]}"
            raise CheckpointError(f"{path} does not fit the model: {found}", allowed="exactly the model's names")
        with torch.no_grad():
            for piece in pieces:
                weights.fill(piece, cast=True)
    training.engine.publish_all()


# -- moments -----------------------------------------------------------------------------------------------------------


def moment_pieces(training: Training, prefix: str) -> Iterator[Piece]:
    """This rank's part of every tensor in the optimizer's state; scalars (step counts) belong to who holds the first element."""
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
                yield Piece(name, value.reshape(-1), Layout.whole(value.shape), owned=owns and layout.run[0] == 0)


def _moment_kinds(training: Training) -> dict[str, Any]:
    """For each parameter its moments: name -> [is elementwise, shape, dtype], or a plain value. The same on all ranks."""
    if training.optimizer is None:
        return {}
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
    for part in comm.gather_objects(mine, training.data_axis):
        merged |= part
    return dict(sorted(merged.items()))


def _make_moments(training: Training, kinds: dict[str, Any]) -> None:
    """Gives the optimizer empty moments of the saved kinds, to be filled."""
    if training.optimizer is None:
        return
    training.optimizer.state.clear()
    for _, slot in training.engine.shards():
        entries = kinds.get(slot.name)
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


def _groups(training: Training) -> list[dict[str, Any]] | None:
    if training.optimizer is None:
        return None
    groups = zip(training.optimizer.param_groups, training.group_names)
    return [{"names": names, "settings": {k: v for k, v in group.items() if k != "params"}} for group, names in groups]


def save_optimizer(training: Training, path: Path, axis: Axis) -> None:
    save(path, moment_pieces(training, ""), {"moments": _moment_kinds(training), "groups": _groups(training)}, {}, axis)


def load_optimizer(training: Training, path: Path, axis: Axis) -> None:
    state = _peek_state(path, axis)
    _make_moments(training, state["moments"])
    state, _ = load(path, moment_pieces(training, ""), axis)
    for group, settings in zip(training.optimizer.param_groups, state["groups"]):  # type: ignore[union-attr]
        group.update(settings["settings"])


def save_state(state: dict[str, Any], path: Path, axis: Axis) -> None:
    save(path, [], state, {}, axis)


def load_state(path: Path, axis: Axis) -> dict[str, Any]:
    return load(path, [], axis)[0]
