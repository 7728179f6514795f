"""Losses of routers: a model's own balance loss over all ranks of a pass, and two that are sums and so independent of any cut.

Legend: T tokens, E experts, K choices of a token, B rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.nn import functional as F

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import ConfigError, PlanError
from phalanx.layout import split_range
from phalanx.parallel.expert.layers import ExpertLayer
from phalanx.parallel.expert.routing import Routing
from phalanx.parallel.expert.share import PassShare


class BalanceLoss:
    """The balance loss of `transformers`, E · sum over experts of (share of choices) · (mean probability), over all ranks of a pass.

    Both shares are quotients of sums over tokens: the sums are added up over the ranks, so every rank has the loss of the whole pass.
    Ranks along `axis` each add their rows' part of it to the step; those along `sequence` have other tokens and compute the same loss.
    Source: Fedus et al. 2021 (Switch Transformers), equations 4 to 6. Cost: one all_reduce of 2 E + 1 numbers; Grad: the same.
    """

    def __init__(self, axis: Axis | None, share: PassShare, sequence: Axis | None = None):
        self.axis, self.share, self.sequence = axis, share, sequence

    def __call__(
        self, gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        if gate_logits is None or not isinstance(gate_logits, tuple):
            return torch.zeros(())
        if attention_mask is not None and self.sequence is not None:  # the logits are those of a part of every row
            attention_mask = attention_mask[:, slice(*split_range(attention_mask.shape[1], self.sequence.size, self.sequence.index))]
        sums = torch.stack([_layer_sums(logits, top_k, attention_mask) for logits in gate_logits]).sum(0) * self.share.weight
        if self.sequence is not None:
            sums = comm.reduce_from(sums, self.sequence)
        if self.axis is not None:
            sums = comm.copy_to(comm.reduce_from(sums, self.axis), self.axis)
        chosen, probability, rows = sums[:num_experts].detach(), sums[num_experts:-1], sums[-1].detach()
        rows = rows.clamp(min=1e-30)
        return ((chosen / rows) * (probability / rows)).sum() * (num_experts or 0) * self.share.count


def _layer_sums(logits_TE: torch.Tensor, top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Choices of each expert, sums of its probabilities, and rows, one after another. Shapes: [2 E + 1]."""
    probabilities = F.softmax(logits_TE, dim=-1)
    chosen_TK = probabilities.topk(top_k, dim=-1).indices
    probabilities = probabilities.float()
    weights = probabilities.new_ones(len(logits_TE)) if mask is None else mask.reshape(-1).to(probabilities)
    counts = torch.zeros_like(probabilities[:1]).reshape(-1).scatter_add(0, chosen_TK.reshape(-1), weights.repeat_interleave(top_k))
    return torch.cat([counts, weights @ probabilities, weights.sum().reshape(1)])


def is_the_usual_loss(function: Any) -> bool:
    """Whether a model's balance loss is the one that `BalanceLoss` computes: tried out on numbers, with and without a mask."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(12, 5, generator=generator) for _ in range(3))
    mask = (torch.rand(3, 4, generator=generator) > 0.3).long()
    ours = BalanceLoss(None, PassShare())
    try:
        return all(bool(torch.isclose(function(logits, 5, 2, m), ours(logits, 5, 2, m), rtol=1e-4)) for m in (None, mask))
    except (TypeError, ValueError, RuntimeError):
        return False


def balance_is_cut(pieces: int, stages: int) -> PlanError:
    """The refusal of a balance loss whose statistics would be those of a piece of the batch."""
    cut = f"{pieces} passes" if stages == 1 else f"{pieces} micro-batches and {stages} stages"
    return PlanError(
        f"the model's balance loss is a product of means over the whole batch, and the plan runs it in {cut}",
        allowed="plans that run a rank's rows in one pass: the means are then taken over all ranks",
        remedy="acc1 without pp, or config.output_router_logits = False with Routing(sequence=0.001), a sum over rows",
    )


def refusing(error: PlanError) -> Callable[..., Any]:
    """What stands in the place of a loss that must not be computed."""

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise error

    return refuse


class RouterLosses:
    """Adds the z-loss and the balance loss of each row to what the router of one layer is trained by.

    z-loss: `z` · sum over tokens of (log sum exp of the logits)². Balance of a row of S tokens: `sequence` · S · sum over experts of
    (E/(K S) · choices of the expert) · (mean share of the expert in the scores). Like every other loss they are divided by the
    count of the step. Rows that are cut over `contexts` are put together by sums over these; of ranks along `sequence` only one counts
    what is printed.
    Sources: Zoph et al. 2022 (ST-MoE), equation 5; DeepSeek-AI 2024 (DeepSeek-V3), equations 17 to 20.
    """

    def __init__(
        self,
        num_experts: int,
        routing: Routing,
        scores: str,
        share: PassShare,
        contexts: Sequence[Axis] = (),
        sequence: Axis | None = None,
    ):
        self.num_experts, self.scores, self.share = num_experts, scores, share
        self.z_weight, self.row_weight = routing.z, routing.sequence
        self.contexts, self.sequence = [axis for axis in contexts if axis.size > 1], sequence
        self.num_rows, self.routed, self.is_read = 0, None, False

    def watch(self, block: nn.Module, router: nn.Module) -> None:
        block.register_forward_pre_hook(self._before_block)
        router.register_forward_hook(self._after_router)
        block.register_forward_hook(self._after_block)

    @torch._dynamo.disable
    def _before_block(self, module: nn.Module, args: Any) -> None:
        hidden = next((value for value in args if isinstance(value, torch.Tensor)), None)
        if hidden is None or (self.row_weight and hidden.dim() != 3):
            raise ConfigError(
                f"{type(module).__name__} does not show which tokens belong to one row",
                allowed="a balance loss by rows for blocks that take [rows, length, width]",
                remedy="Routing(sequence=0)",
            )
        self.num_rows, self.routed = hidden.shape[0], None

    @torch._dynamo.disable
    def _after_router(self, module: nn.Module, args: Any, output: Any) -> None:
        self.routed = output

    @torch._dynamo.disable
    def _after_block(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Joins the backward where it always passes, and once, however often the block ran its router."""
        if self.routed is None or not module.training or not torch.is_grad_enabled():
            return output
        if not self.is_read:
            self.scores, self.is_read = read_scores(self.routed, self.num_experts, self.scores, reads_logits=self.z_weight > 0), True
        logits = self.routed[0] if isinstance(self.routed, tuple) else self.routed
        loss = self.z_weight * self._squares(logits.reshape(-1, self.num_experts)) if self.z_weight else logits.new_zeros(())
        if self.row_weight:
            loss = loss + self.row_weight * self._row_balance(logits.reshape(self.num_rows, -1, self.num_experts), self.routed)
        self._print(loss)
        self.routed = None
        if not isinstance(output, tuple):
            return _Differentiated.apply(output, loss, self.share)
        return type(output)((_Differentiated.apply(output[0], loss, self.share), *output[1:]))

    def _squares(self, logits_TE: torch.Tensor) -> torch.Tensor:
        squares_T, counted_T = torch.logsumexp(logits_TE.float(), -1) ** 2, self.share.counted(logits_TE)
        return squares_T.sum() if counted_T is None else (squares_T * counted_T).sum()

    def _print(self, loss: torch.Tensor) -> None:
        """Adds the loss to what is printed. Cost: one all_reduce of a number where the sequence is split between layers."""
        if self.share.is_repeat:
            return
        total = loss.detach().clone()
        if self.sequence is not None:
            comm.all_reduce(total, self.sequence)
        self.share.add(total)

    def _row_balance(self, logits_BSE: torch.Tensor, output: Any) -> torch.Tensor:
        chosen = output[2].reshape(*logits_BSE.shape[:2], -1) if isinstance(output, tuple) else None
        if chosen is None:
            raise ConfigError("a router that returns logits alone does not say what was chosen", remedy="Routing(sequence=0)")
        scores_BSE = SCORES[self.scores](logits_BSE.float())
        scores_BSE = scores_BSE / scores_BSE.sum(-1, keepdim=True)
        counted_T = self.share.counted(logits_BSE.flatten(0, 1))
        counted_BS = torch.ones_like(scores_BSE[..., 0]) if counted_T is None else counted_T.view(scores_BSE.shape[:2]).to(scores_BSE)
        counts_BE = torch.zeros_like(scores_BSE[:, 0]).scatter_add(
            1, chosen.flatten(1), counted_BS[..., None].expand(chosen.shape).flatten(1)
        )
        sums_BE, length = (scores_BSE * counted_BS[..., None]).sum(1), counted_BS[0].sum()
        for axis in self.contexts:  # each rank adds its own tokens' part of the loss, with the choices of all tokens of a row
            comm.all_reduce(counts_BE, axis)
            comm.all_reduce(length, axis)
        return (counts_BE * sums_BE).sum() * self.num_experts / (chosen.shape[-1] * length)


# What routers make of their logits before they choose and weigh.
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "plain": lambda scores: scores,
}


@torch.no_grad()
def read_scores(routed: Any, num_experts: int, likely: str, *, reads_logits: bool) -> str:
    """Which scores a router weighs choices by, read from the first thing that it gave out; `likely` where one choice tells nothing.

    Cost: one host read, once a layer.
    Raises: ConfigError for a router whose logits, weights or choices are not where losses look for them.
    """
    logits, weights, chosen = routed if isinstance(routed, tuple) and len(routed) == 3 else (routed, None, None)
    logits = logits[0] if isinstance(logits, tuple) else logits
    if not torch.is_floating_point(logits) or logits.shape[-1] != num_experts:
        raise _unreadable("gives out no logits, one for each expert, before all else")
    if detect_fake_mode(logits) is not None:
        return likely
    logits = logits.float()
    are_shares = bool((logits >= 0).all() & ((logits.sum(-1) - 1).abs() < 1e-3).all())
    if reads_logits and are_shares:
        raise _unreadable("gives out probabilities, of which a z-loss cannot be formed")
    if chosen is None or chosen.is_floating_point() or chosen.shape[-1] < 2:
        return "plain" if are_shares else likely
    weights = weights.reshape(chosen.shape).float()
    for name in ("plain",) if are_shares else (likely, *SCORES):
        of_choices = SCORES[name](logits).reshape(-1, num_experts).gather(1, chosen.reshape(-1, chosen.shape[-1]).long())
        across = weights.reshape(of_choices.shape) * of_choices[:, :1] - weights.reshape(of_choices.shape)[:, :1] * of_choices
        if bool((across.abs() <= 0.02 * (weights.reshape(of_choices.shape)[:, :1] * of_choices).abs() + 1e-6).all()):
            return name
    raise _unreadable(f"weighs choices by scores that are none of {', '.join(SCORES)}")


def _unreadable(fault: str) -> ConfigError:
    return ConfigError(
        f"a router {fault}", allowed="routers that return (logits, weights, choices), or logits", remedy="Routing() without z and sequence"
    )


class _Differentiated(torch.autograd.Function):
    """The same tensor, in whose backward a loss is differentiated too, with the slope that the pass then has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, share: PassShare) -> torch.Tensor:
        ctx.share, ctx.like = share, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        dtype, device = ctx.like
        return grad, torch.full((), ctx.share.slope, dtype=dtype, device=device), None


def add_losses(layers: Sequence[ExpertLayer], routing: Routing, share: PassShare, contexts: Sequence[Axis], sequence: Axis | None) -> None:
    """Lets the routers of all layers train on the losses of `routing` as well. `contexts`: ranks that have parts of one row."""
    if not routing.z and not routing.sequence:
        return
    for layer in layers:
        scores = "sigmoid" if layer.correction_bias() is not None else "softmax"
        RouterLosses(layer.num_experts, routing, scores, share, contexts, sequence).watch(layer.block, layer.router())
