"""Wires tensor parallelism: reads the model once for all ranks, and lets a kind of it take the modules."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from phalanx.anatomy import Anatomy, Unrunnable, call_with, is_linear, read_anatomy, read_stream
from phalanx.anatomy.experts_seam import stacked_experts
from phalanx.cluster import comm, launch
from phalanx.cluster import device as devices
from phalanx.cluster.placement import Placement
from phalanx.cluster.random import SplitDraws
from phalanx.errors import PlanError
from phalanx.log import get_logger
from phalanx.parallel.tensor import Head, OneDimensional, OnGrid, SplitLogits, VocabularyLoss, grid_2d, grid_3d, grid_25d, split_model
from phalanx.parallel.tensor.kind import Place
from phalanx.parallel.tensor.one import multiply, weights_of

if TYPE_CHECKING:
    from phalanx.booster.passes import Context


def split(model: nn.Module, context: Context) -> None:
    """Splits the model's layers over the tensor axis.

    Raises: PlanError where the model cannot be read, or nothing of it can be split.
    """
    anatomy = read(model, context)
    _require_split(anatomy, model, context)
    if context.mesh.rank == 0:
        _tell_what_stays_whole(model, anatomy, context.plan.tp)
    owners = _owners(model)

    def place(module: nn.Module, attribute: str, placement: Placement) -> None:
        for owner, name in owners[id(module._parameters[attribute])]:
            context.placements.declare(owner, name, placement)

    features = context.roles.copies
    draws = SplitDraws(features.index, devices.get(launch.world().device.type)) if anatomy.draws or _has_rates(model) else None
    context.draws = draws
    logits = _read_by_loss(SplitLogits(features), context)
    if context.plan.chunked_loss:
        _require_head(model, anatomy)
    kind = _kind(context, place, logits, _joining(model, anatomy, context), draws)
    split_model(model, anatomy, kind, features.size, kind.part)


def chunk_loss(model: nn.Module, context: Context) -> None:
    """Leaves the forming of logits to the loss, on a model whose layers are not split.

    Raises: PlanError where no head is found.
    """
    head = _require_head(model, read(model, context))
    logits = _read_by_loss(SplitLogits(context.roles.copies), context)
    module = model.get_submodule(head)
    size = weights_of(module)[0].shape[0]
    module.forward = Head(  # type: ignore[method-assign]
        module, logits, size, lambda entered: multiply(module, entered), lambda: weights_of(module), is_chunked=True
    )


def _read_by_loss(logits: SplitLogits, context: Context) -> SplitLogits:
    context.causal_loss, context.reading = VocabularyLoss(logits), logits.reading
    return logits


def _require_head(model: nn.Module, anatomy: Anatomy) -> str:
    heads = [name for name in anatomy.vocabulary if is_linear(model.get_submodule(name))]
    if len(heads) == 1:
        return heads[0]
    raise PlanError(
        f"chunked_loss finds {len(heads) or 'no'} projections to logits in {type(model).__name__}",
        allowed="models with a token embedding and one head",
        remedy="leave chunked_loss out",
    )


def _kind(
    context: Context, place: Place, logits: SplitLogits, joining: Container[nn.Module], draws: SplitDraws | None
) -> OneDimensional | OnGrid:
    plan, mesh = context.plan, context.mesh
    options: dict[str, Any] = {"draws": draws, "is_chunked": plan.chunked_loss}
    if plan.tp_kind == "1d":
        return OneDimensional(mesh.axis("tp"), place, logits, by_sequence=plan.sp, keep=plan.keeps_gathered, **options)
    if plan.tp_kind == "3d":
        grid = grid_3d(mesh, keep=plan.keeps_gathered)
    else:
        square = grid_2d if plan.tp_kind == "2d" else grid_25d
        grid = square(mesh, keep=plan.keeps_gathered, outputs_move=plan.tp_outputs_move)
    return OnGrid(grid, place, f"tp:{plan.tp_kind}", logits, joining=joining, **options)


def _joining(model: nn.Module, anatomy: Anatomy, context: Context) -> set[nn.Module]:
    """On a grid, the whole projections whose outputs belong to the stream; none otherwise. Collective.

    Raises: PlanError where what flows between projections cannot be cut by features.
    """
    if context.plan.tp_kind == "1d":
        return set()
    world, stream = context.mesh.world, None
    if world.index == 0 or world.backend == "fake":
        stream = read_stream(model, anatomy.seams, _call(context))
    stream = comm.broadcast_object(stream, world)
    for name, fault in stream.faults.items():
        raise PlanError(
            f"tp:{context.plan.tp_kind} cuts features, and {name} cannot take in a part of them: {fault}",
            allowed="blocks in which nothing but norms and projections mixes features",
            remedy=f"tp{context.roles.copies.size}, which is 1D",
        )
    return {module for name, module in model.named_modules() if stream.joins(name)}


def read(model: nn.Module, context: Context) -> Anatomy:
    """The reading of the model for this plan: made by the first rank, and the same on all. Collective."""
    world, tp = context.mesh.world, context.roles.copies.size
    outcome: Anatomy | PlanError | None = None
    if world.index == 0 or world.backend == "fake":
        outcome = _read_or_refuse(model, context, tp)
    outcome = comm.broadcast_object(outcome, world)
    if isinstance(outcome, PlanError):
        raise outcome
    assert outcome is not None
    return outcome


def _read_or_refuse(model: nn.Module, context: Context, tp: int) -> Anatomy | PlanError:
    try:
        return read_anatomy(model, tp, _call(context))
    except Unrunnable as error:
        return PlanError(
            f"tp{tp} needs a trial run of {type(model).__name__}, which failed: {error}",
            allowed="models that run on a made-up or a given batch",
            remedy="boost(..., dataloader=loader), so that a batch is at hand",
        )


def _call(context: Context) -> Any:
    with unset_fake_temporarily():
        return call_with(context.example, context.forward) if context.example is not None else None


def _require_split(anatomy: Anatomy, model: nn.Module, context: Context) -> None:
    tp = context.mesh.size("tp")
    if not anatomy.seams and not stacked_experts(model):  # the width of experts is split where they are placed
        name, reason = next(iter(anatomy.whole.items()), ("the model", "it has no projections"))
        raise PlanError(
            f"tp{tp} finds nothing to split: {name}: {reason}", allowed="layers with heads or an MLP", remedy="zero3 in place of tp"
        )
    if context.plan.sp and not anatomy.layers:
        raise PlanError("sp cuts the stream between layers, and the model has no stack of layers", remedy=f"tp{tp} without sp")
    if context.plan.sp and anatomy.mixing:
        name, source = next(iter(anatomy.mixing.items()))
        raise PlanError(
            f"sp cuts the sequence, and {name} takes in other tokens of {source}",
            allowed="sp where every attention is split by heads",
            remedy=f"tp{tp} without sp",
        )
    if context.plan.sp and anatomy.sequence is not None:
        raise PlanError(
            f"sp cuts the sequence, and a trial with a part of it went wrong: {anatomy.sequence}",
            allowed="blocks that treat each token by itself outside of attentions that are split by heads",
            remedy=f"tp{tp} without sp",
        )


def _tell_what_stays_whole(model: nn.Module, anatomy: Anatomy, tp: int) -> None:
    """One line from the first rank about projections inside of layers that are not split; the numbers are right all the same."""
    inside = [
        name
        for name in anatomy.whole
        if is_linear(model.get_submodule(name)) and name.startswith(tuple(f"{layer}." for layer in anatomy.layers))
    ]
    if inside:
        first = inside[0]
        get_logger().info(
            f"tp{tp} keeps {len(inside)} projections whole on every rank; {first}: {anatomy.whole[first]} (see phalanx anatomy)"
        )


def _has_rates(model: nn.Module) -> bool:
    """Whether any rate of dropout is above 0, in a module or in a number that a module keeps."""
    rates = (value for module in model.modules() for name, value in vars(module).items() if "drop" in name and isinstance(value, float))
    return any(rates) or any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, attribute))
    return owners
