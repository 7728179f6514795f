"""The ordered passes that turn a person's model into one that runs under the plan; each is a no-op where its term is absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from phalanx.anatomy import is_batch_dependent, layer_stacks, replace_causal_loss, takes_cache
from phalanx.booster import tensor_parallel
from phalanx.booster.gradient_hooks import refuse_gradient_hooks
from phalanx.booster.mixtures import place_experts, sum_balance_losses
from phalanx.booster.roles import AxisRoles
from phalanx.booster.stages import Stages, recompute_by_stage
from phalanx.cluster.mesh import Axis, Mesh
from phalanx.cluster.placement import Placements
from phalanx.cluster.random import SplitDraws, Streams
from phalanx.errors import PlanError
from phalanx.kernels.cross_entropy import causal_loss
from phalanx.memory import StateEngine
from phalanx.parallel import recompute
from phalanx.parallel.expert.lending import Lending
from phalanx.parallel.expert.mixture import Mixture
from phalanx.parallel.expert.routing import Routing
from phalanx.parallel.expert.share import PassShare
from phalanx.plan import Plan
from phalanx.precision import Precision


@dataclass
class Context:
    """What a pass may need to know, and where it says what it did.

    `placements` takes the boxes of the parameters that a pass cuts; `loss_copies` are the axes whose ranks compute the same loss.
    `share` is what the running pass counts for, `mixture` the experts of the model, if it has any, and
    `lending` brings divided ones together.
    `example` is a batch and `forward` what is called with it, where a person gave them. `causal_loss` is the next-token loss that the
    model gets in place of its own; inside of `reading()` logits may stay in parts, and what is done with them is seen.
    """

    plan: Plan
    mesh: Mesh
    roles: AxisRoles
    precision: Precision
    streams: Streams
    uses_own_loss: bool
    placements: Placements = field(default_factory=Placements)
    loss_copies: tuple[Axis, ...] = ()
    routing: Routing = field(default_factory=Routing)
    share: PassShare = field(default_factory=PassShare)
    mixture: Mixture | None = None
    lending: Lending | None = None
    stages: Stages | None = None
    draws: SplitDraws | None = None
    example: Any = None
    forward: Callable[[nn.Module, Any], Any] | None = None
    causal_loss: Callable[..., torch.Tensor] = causal_loss
    reading: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def of(
        cls, plan: Plan, mesh: Mesh, precision: Precision, streams: Streams, *, uses_own_loss: bool, routing: Routing | None = None
    ) -> Context:
        """What holds before any pass: tensor ranks do the same work and compute the same loss, on a grid those of the same rows."""
        roles = AxisRoles.of(plan, mesh)
        placements = Placements((roles.copies,), (roles.stored,))
        return cls(plan, mesh, roles, precision, streams, uses_own_loss, placements, (roles.copies,), routing or Routing())

    @property
    def stream(self) -> tuple[str, ...]:
        """The random stream of a training forward: that of the data index, of its rows, and of the stage where there are several."""
        rows = () if self.roles.rows.size == 1 else (f"rows {self.roles.rows.index}",)
        stage = () if self.stages is None or self.stages.current == 0 else (f"stage {self.stages.current}",)
        return (str(self.mesh.axis("dp", "cp").index), *rows, *stage)

    @contextmanager
    def whole(self, engine: StateEngine) -> Iterator[None]:
        """What other ranks hold of the layers, on every rank while inside: stages of a pipeline, and experts. Collective."""
        with ExitStack() as stack:
            if self.stages is not None:
                stack.enter_context(self.stages.whole())
            if self.lending is not None:
                stack.enter_context(self.lending.everything(engine.full_masters))
            yield

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss and count enter the sums over all ranks."""
        return all(axis.index == 0 for axis in self.loss_copies)


def refuse_batch_dependence(model: nn.Module, context: Context) -> nn.Module:
    """Models whose numbers depend on how the batch is cut cannot be exact where it is cut."""
    names = is_batch_dependent(model)
    pieces = context.mesh.axis("dp", "cp").size * context.roles.rows.size * context.plan.acc * context.plan.num_micro
    if names and pieces > 1:
        raise PlanError(
            f"{names[0]}, and the plan cuts the batch into {pieces} pieces",
            allowed="modules that treat each row by itself",
            remedy="GroupNorm or LayerNorm in its place, or one process with acc1",
        )
    return model


def split_tensors(model: nn.Module, context: Context) -> nn.Module:
    """Splits the layers over the tensor axis; where there is none, a chunked loss takes the head."""
    if context.plan.tp > 1:
        tensor_parallel.split(model, context)
    elif context.plan.chunked_loss:
        tensor_parallel.chunk_loss(model, context)
    return model


def recompute_blocks(model: nn.Module, context: Context) -> nn.Module:
    if context.stages is not None:
        recompute_by_stage(context.plan, context.stages.table, context.stages.cut)
    elif context.plan.recompute is not None:
        recompute.apply([block for _, block in layer_stacks(model)], context.plan.recompute)
    return model


def plug_loss(model: nn.Module, context: Context) -> nn.Module:
    """The model's own next-token loss without its float32 copy of the logits."""
    if context.uses_own_loss:
        replace_causal_loss(model, context.causal_loss)
    return model


def enter_streams(model: nn.Module, context: Context) -> nn.Module:
    """Runs every training forward on a random stream of its own for each part of the data: rows, or parts of rows."""
    stack: list[ExitStack] = []

    @torch._dynamo.disable
    def enter(module: nn.Module, args: Any) -> None:
        scope = ExitStack()
        if module.training and not stack:
            scope.enter_context(context.streams.fork("model", *context.stream))
        stack.append(scope)

    @torch._dynamo.disable
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if stack:
            stack.pop().close()

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)
    return model


def cast_inputs(model: nn.Module, context: Context) -> nn.Module:
    """Floating inputs meet the weights in the compute dtype; labels stay as they are."""
    if context.precision.compute is None:
        return model
    cast = context.precision.cast_inputs

    @torch._dynamo.disable
    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tuple(cast(list(args))), {key: value if key == "labels" else cast(value) for key, value in kwargs.items()}

    model.register_forward_pre_hook(before, with_kwargs=True)
    return model


def train_without_cache(model: nn.Module, context: Context) -> nn.Module:
    """Training keeps no cache of keys and values: it costs memory, and with it `transformers` does not see document borders."""
    if takes_cache(model):

        @torch._dynamo.disable
        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return args, {"use_cache": False, **kwargs} if module.training else kwargs

        model.register_forward_pre_hook(before, with_kwargs=True)
    return model


def cut_into_stages(model: nn.Module, context: Context) -> nn.Module:
    """Leaves on this rank what its stages of the pipeline hold."""
    return model if context.stages is None else context.stages.apply(context.placements, context.precision, context.draws)


PASSES: tuple[Callable[[nn.Module, Context], nn.Module], ...] = (
    refuse_batch_dependence,
    refuse_gradient_hooks,
    split_tensors,
    plug_loss,
    sum_balance_losses,
    place_experts,
    recompute_blocks,
    enter_streams,
    train_without_cache,
    cast_inputs,
    cut_into_stages,
)
