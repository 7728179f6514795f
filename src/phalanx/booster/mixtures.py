"""Wires mixtures of experts: their places, their routers' losses, and what is counted of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from phalanx.anatomy.balance_seam import balance_loss_of, balance_speakers, replace_balance_loss
from phalanx.anatomy.expert_lists import ExpertList
from phalanx.cluster import launch
from phalanx.cluster.mesh import Axis
from phalanx.errors import PlanError
from phalanx.memory.partition import find_slots
from phalanx.parallel.expert.apply import refuse_without_experts, spread_experts
from phalanx.parallel.expert.axes import ExpertAxes
from phalanx.parallel.expert.layers import ExpertLayer, correction_biases, find_layers
from phalanx.parallel.expert.lending import Lending
from phalanx.parallel.expert.losses import BalanceLoss, add_losses, balance_is_cut, is_the_usual_loss, refusing
from phalanx.parallel.expert.mixture import Mixture

if TYPE_CHECKING:
    from phalanx.booster.passes import Context


def sum_balance_losses(model: nn.Module, context: Context) -> nn.Module:
    """A mixture's own balance loss is a product of means over the batch: it is formed of sums over all ranks of a pass."""
    plan = context.plan
    for speaker in balance_speakers(model):
        if not is_the_usual_loss(balance_loss_of(speaker)):
            continue
        pieces = plan.acc if plan.pp == 1 else plan.acc * plan.num_micro
        function: Any = BalanceLoss(context.mesh.axis("dp", "cp"), context.share, _sequence_axis(context))
        if pieces > 1 or plan.pp > 1:
            refusal = balance_is_cut(pieces, plan.pp)
            if asks_for_balance(speaker):
                raise refusal
            function = refusing(refusal)
        replace_balance_loss(speaker, function)
    return model


def asks_for_balance(speaker: nn.Module) -> bool:
    """Whether a model's config turns its balance loss on."""
    config = getattr(speaker, "config", None)
    return bool(getattr(config, "output_router_logits", False)) and getattr(config, "router_aux_loss_coef", None) != 0


def place_experts(model: nn.Module, context: Context) -> nn.Module:
    """Divides the experts of every layer among groups of ep data ranks, counts their loads, and trains their routers."""
    layers, plan, routing, mesh = find_layers(model, context.share), context.plan, context.routing, context.mesh
    if not layers:
        refuse_without_experts(model, plan.ep, routing)
        return model
    _refuse_mismatch(layers, context)
    fewest = min(layer.num_experts for layer in layers)
    axes = ExpertAxes.of(mesh, plan.ep, by_sequence=plan.sp, fewest=fewest, local_size=launch.world().local_size)
    context.lending = Lending({owner: slot.name for slot in find_slots(model) for owner in slot.owners})
    spread_experts(layers, axes, context.placements, routing, context.lending)
    sequence = context.share.sequence = _sequence_axis(context)
    add_losses(layers, routing, context.share, [axis for axis in (mesh.axis("cp"), sequence) if axis is not None], sequence)
    context.mixture = Mixture(
        loads=[layer.load for layer in layers],
        tokens=[axis for axis in (mesh.axis("dp", "cp"), sequence, mesh.axis("pp")) if axis is not None],
        device=launch.world().device,
        biases=correction_biases(layers) if routing.bias_rate else (),
        bias_rate=routing.bias_rate,
        uncounted=_uncounted(layers, context),
    )
    return model


def _sequence_axis(context: Context) -> Axis | None:
    """The tensor ranks, where they see other tokens of the same rows between layers."""
    return context.mesh.axis("tp") if context.plan.sp else None


def _uncounted(layers: list[ExpertLayer], context: Context) -> PlanError | None:
    """Why the loads of these layers are not those of the batch's own tokens, if so."""
    listed = next((layer for layer in layers if isinstance(layer.found, ExpertList)), None)
    if context.plan.cp == 1 or listed is None:
        return None
    return PlanError(
        f"cp{context.plan.cp} fills rows up, and the choices of {type(listed.block).__name__} do not tell which tokens do so",
        allowed="loads, and bias_rate that follows them, for stacked experts of transformers where sequences are cut",
        remedy="a plan without cp",
    )


def _refuse_mismatch(layers: list[ExpertLayer], context: Context) -> None:
    if context.routing.bias_rate and (uncounted := _uncounted(layers, context)) is not None:
        raise uncounted
    if context.plan.sp and any(isinstance(layer.found, ExpertList) for layer in layers):
        raise PlanError(
            f"sp cuts the sequence, and {type(layers[0].block).__name__} calls experts that tp may have split on tokens of its own choice",
            allowed="sp with stacked experts of transformers",
            remedy=f"tp{context.plan.tp} without sp",
        )
    if context.plan.tp > 1 and context.plan.tp_kind != "1d":
        raise PlanError(
            f"tp{context.plan.tp}:{context.plan.tp_kind} splits the width of tokens, and {layers[0].name} routes whole tokens",
            allowed="mixtures of experts with 1D tensor parallelism",
            remedy=f"tp{context.plan.tp}",
        )
