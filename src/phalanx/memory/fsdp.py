"""PyTorch's own engine, `fully_shard`, behind the interface of the state engine: for people who want it, and as an oracle.

PyTorch decides what is gathered and reduced when. What moves goes through `comm`, sums instead of averaging, and reaches the optimizer
as plain local tensors. A rank holds a run of rows of every parameter. To callers the whole model is one chunk: the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis, group_of
from phalanx.errors import ConfigError
from phalanx.layout import Layout, Piece
from phalanx.memory.chunk import Slot
from phalanx.memory.engine import broadcast_from_first, sharded_state_dict
from phalanx.memory.partition import Unit, find_slots
from phalanx.memory.policy import ZERO
from phalanx.memory.reduction import backward_outside
from phalanx.memory.stream import Trace
from phalanx.precision import DTypes, Precision


@dataclass(frozen=True)
class Collective:
    """What PyTorch calls in place of its own collective: `run(out, input)`."""

    run: Callable[[torch.Tensor, torch.Tensor], None]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **options: Any) -> None:
        self.run(output_tensor, input_tensor)


class FsdpEngine:
    """Shards `model` over `axis` with `fully_shard`: each of `blocks` by itself, the rest with the root.

    A block that shares a weight with something outside of it belongs to the root. Gradients are reduced in every pass, so that no rank
    keeps a whole one.
    Raises: ConfigError for parameters that PyTorch cannot shard exactly.
    """

    policy = ZERO[3]
    tiers = None

    def __init__(
        self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], *, precision: Precision, axis: Axis, device: torch.device
    ):
        _require_recent_pytorch()
        self.model, self.axis, self.device = model, axis, device
        slots = find_slots(model)
        self.dtypes = _only_dtypes(slots, precision)
        for slot in slots:
            _require_shardable(slot)
            value = broadcast_from_first(slot.parameter.detach().to(device, self.dtypes.master), axis)
            slot.parameter.data, slot.parameter.grad = value.contiguous(), None
        self.units = [*_separate_blocks(blocks, slots), Unit("rest", [model])]
        self.traces = {grad: Trace("training" if grad else "evaluation", axis, self.units) for grad in (True, False)}
        self.trace = self.traces[True]
        self.in_backward = False
        self.held = 0
        self._shard(slots)
        # The model shows a slot's parameter in full at times; this is what it shows at all others, a DTensor.
        self.sharded = {slot.name: self._shown(slot) for slot in slots}
        self.shown: list[nn.Parameter] = []
        self.slots = [(self, slot) for slot in slots]
        for slot in slots:
            slot.parameter = self.sharded[slot.name]
            local = self._local(slot.parameter)
            slot.shard = nn.Parameter(local) if local.numel() else None
        self._watch_use()
        model.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.register_forward_hook(self._end_forward, always_call=True)
        model.register_state_dict_pre_hook(self._refuse_sharded_state_dict)

    # -- construction --------------------------------------------------------------------------------------------------

    def _shard(self, slots: Sequence[Slot]) -> None:
        mesh = DeviceMesh.from_group(group_of(self.axis), self.device.type, mesh_dim_names=(self.axis.name.replace(".", "_"),))
        compute = self.dtypes.compute if self.dtypes.has_master else None
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=self.dtypes.reduce, cast_forward_inputs=False)
        empty = {slot.parameter for slot in slots if not slot.num_elements}
        for index, module in enumerate(self.modules):
            is_root = module is self.model
            fully_shard(module, mesh=mesh, reshard_after_forward=not is_root, mp_policy=precision, ignored_params=empty)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(Collective(partial(self._gather, index)))
            module.set_custom_reduce_scatter(Collective(partial(self._reduce, index)))
        # A rank that did not use a parameter takes part in its sum with zeros.
        self.model.set_reduce_scatter_unused_params(True)

    @property
    def modules(self) -> list[Any]:
        return [unit.modules[0] for unit in self.units]

    def _watch_use(self) -> None:
        """Notes whose gradient arrives on this rank: in the sums nobody can tell a parameter without use from one with a gradient of 0."""
        self.held += 1
        for module in self.modules:
            module.unshard()
            for _, slot in self.slots:
                if self._shown(slot) is not slot.parameter or (module is self.model and not slot.num_elements):
                    self._watch(slot, self._shown(slot))
            module.reshard()
        self.held -= 1

    def _watch(self, slot: Slot, parameter: nn.Parameter) -> None:
        def note(_: torch.Tensor) -> None:
            slot.used = True

        self.shown.append(parameter)
        # A frozen parameter may be unfrozen later, so it is watched from the start.
        needs_grad = parameter.requires_grad
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(note)
        parameter.requires_grad_(needs_grad)

    def _shown(self, slot: Slot) -> nn.Parameter:
        module, attribute = slot.owners[0]
        return module._parameters[attribute]  # type: ignore[return-value]

    # -- what PyTorch calls --------------------------------------------------------------------------------------------

    def _gather(self, index: int, out: torch.Tensor, shard: torch.Tensor) -> None:
        self._visit(index)
        comm.all_gather(out, shard, self.axis)

    def _reduce(self, index: int, out: torch.Tensor, full: torch.Tensor) -> None:
        if not self.in_backward:
            raise backward_outside()
        self._visit(index)
        comm.reduce_scatter(out, full, self.axis)

    def _visit(self, index: int) -> None:
        if not self.held:
            self.trace.visit(index)

    # -- one pass ------------------------------------------------------------------------------------------------------

    @torch._dynamo.disable
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        self.trace = self.traces[torch.is_grad_enabled()]
        if not self.held:
            self.trace.begin()

    @torch._dynamo.disable
    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is None:  # it raised
            self._abandon()
        elif not torch.is_grad_enabled() and not self.held:
            self.trace.end()
            self.model.reshard()  # the root stays gathered for a backward, and none comes

    @contextmanager
    def backward(self, synchronise: bool = True) -> Iterator[None]:
        """Runs a backward inside; its gradients are summed over ranks whether or not `synchronise` asks for it."""
        self.in_backward, self.trace = True, self.traces[True]
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        finally:
            self.in_backward = False
        if not self.held:
            self.trace.end()

    def _abandon(self) -> None:
        """After a pass that raised: forgets its state, so that the error is what the person sees and the next pass starts clean."""
        self.model.reset_iter_state()
        for parameter in self.shown:
            parameter.grad = None

    # -- one step ------------------------------------------------------------------------------------------------------

    def finish_gradients(self) -> None:
        """Every backward has summed its gradients already."""

    def used(self) -> set[str]:
        """The parameters of which this rank has a gradient."""
        return {slot.name for _, slot in self.slots if slot.used}

    def set_used(self, names: Container[str]) -> None:
        """Sets which parameters have a gradient on any rank; the others are not touched by the optimizer."""
        for _, slot in self.slots:
            slot.used = slot.name in names

    def _gradient(self, slot: Slot) -> torch.Tensor | None:
        """This rank's rows of the summed gradient, flat."""
        gradient = self.sharded[slot.name].grad
        return self._local(gradient) if slot.used and gradient is not None else None

    def gradient_parts(self) -> Iterator[torch.Tensor]:
        """Flat parts of the summed gradient, such that over all ranks each logical element comes exactly once."""
        parts = (self._gradient(slot) for _, slot in self.shards())
        return (part for part in parts if part is not None)

    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        """Runs the optimizer's `step` on this rank's shards, of the parameters that got a gradient on any rank."""
        for _, slot in self.shards():
            slot.shard.grad = self._gradient(slot)  # type: ignore[union-attr]
        step()
        self.publish()

    def begin_pass(self, number: int) -> None:
        return None

    def publish(self) -> None:
        """Makes updates of the shards visible to the model: whatever is still gathered is gathered anew."""
        for module in self.modules:
            module.reshard()

    publish_all = publish

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Nothing to look for: PyTorch's engine tells by itself."""
        yield

    def look_again(self) -> None:
        """After a loss that was not a number: PyTorch refuses by itself whatever reads a parameter while it is sharded."""

    def seal_gradients(self) -> None:
        """A person's code may see PyTorch's own gradients."""

    def clear_gradients(self) -> None:
        for _, slot in self.slots:
            slot.used, self.sharded[slot.name].grad = False, None
            if slot.shard is not None:
                slot.shard.grad = None

    # -- whole tensors -------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The whole model in full on every rank while inside; what is changed there is not kept.

        Cost: the model's bytes in compute dtype.
        """
        self.held += 1
        for module in self.modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        self._show()
        try:
            yield
        finally:
            self.held -= 1
            if not self.held:
                for module in self.modules:
                    module.set_reshard_after_forward(module is not self.model, recurse=False)
                    module.reshard()
                self._show()

    def _show(self) -> None:
        for _, slot in self.slots:
            slot.parameter = self._shown(slot)

    def full_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, full value in master dtype), the same on every rank, one at a time."""
        for _, slot in self.slots:
            yield slot.name, self._whole(slot, self._local(self.sharded[slot.name]))

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, full gradient summed over ranks) of the parameters in use, the same on every rank."""
        for _, slot in self.slots:
            gradient = self._gradient(slot)
            if gradient is not None:
                yield slot.name, self._whole(slot, gradient)

    def _whole(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        if not slot.num_elements:
            return local.view(slot.shape)
        padded = local.new_zeros(self._rows_per_rank(slot) * (slot.num_elements // slot.shape[0]))
        padded[: local.numel()] = local
        whole = local.new_empty(self.axis.size * padded.numel())
        comm.all_gather(whole, padded, self.axis).wait()
        return whole[: slot.num_elements].view(slot.shape)

    # -- where things lie, for saving ----------------------------------------------------------------------------------

    @staticmethod
    def _local(tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a parameter or gradient, flat; parameters without elements are plain tensors."""
        tensor = tensor.detach()
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).reshape(-1)

    def _rows_per_rank(self, slot: Slot) -> int:
        return -(-slot.shape[0] // self.axis.size)

    def local_run(self, slot: Slot) -> tuple[int, int]:
        """The elements of a parameter that lie on this rank, as a range of the flattened parameter."""
        if not slot.num_elements:
            return 0, 0
        per_rank = self._rows_per_rank(slot) * (slot.num_elements // slot.shape[0])
        first, last = (min(index * per_rank, slot.num_elements) for index in (self.axis.index, self.axis.index + 1))
        return first, last

    def layout(self, slot: Slot) -> Layout:
        return Layout.whole(slot.shape).with_run(*self.local_run(slot))

    def cut(self, slot: Slot, full: torch.Tensor) -> torch.Tensor:
        """What the optimizer holds on this rank of a tensor that is like the whole parameter."""
        return full.reshape(-1)[slice(*self.local_run(slot))]

    def shards(self) -> Iterator[tuple[FsdpEngine, Slot]]:
        """The parameters of which the optimizer holds something on this rank."""
        return ((self, slot) for _, slot in self.slots if slot.shard is not None)

    def pieces(self, prefix: str) -> Iterator[Piece]:
        """This rank's part of every parameter, in master dtype, for a checkpoint."""
        for _, slot in self.slots:
            if slot.shard is not None or not slot.num_elements:
                local = self._local(self.sharded[slot.name])
                yield Piece(prefix + slot.name, local, self.layout(slot), owned=self.is_first or slot.shard is not None)

    @property
    def is_first(self) -> bool:
        return self.axis.index == 0

    def owns(self, chunk: FsdpEngine, slot: Slot) -> bool:
        """Whether this rank is the one that writes what it holds of a parameter."""
        return slot.shard is not None

    def _refuse_sharded_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self.held:
            raise sharded_state_dict()


def _separate_blocks(blocks: Sequence[tuple[str, nn.Module]], slots: Sequence[Slot]) -> list[Unit]:
    """The blocks that can be sharded by themselves: they are called, and none of their weights is tied to something outside."""
    block_of = {id(module): index for index, (_, block) in enumerate(blocks) for module in block.modules()}
    homes = [{block_of.get(id(owner), -1) for owner, _ in slot.owners} for slot in slots]
    tied = set().union(*(home for home in homes if len(home) > 1))
    return [
        Unit(name, [block])
        for index, (name, block) in enumerate(blocks)
        if index not in tied and not isinstance(block, (nn.ModuleList, nn.ModuleDict))
    ]


def _only_dtypes(slots: Sequence[Slot], precision: Precision) -> DTypes:
    """The one set of dtypes of all parameters."""
    kinds = {precision.for_parameter(slot.dtype): slot for slot in slots}
    if len(kinds) > 1:
        raise ConfigError(
            f"parameters of several kinds: {', '.join(f'{slot.name} is {slot.dtype}' for slot in kinds.values())}",
            allowed="one dtype in all of a model under fsdp",
            remedy="zero3, which takes mixed dtypes",
        )
    dtypes = next(iter(kinds), precision.for_parameter(torch.float32))
    if dtypes.gradient != dtypes.master:
        raise ConfigError(
            f"'{kinds[dtypes].name}' is {kinds[dtypes].dtype}, and fsdp would add its gradients up in that dtype",
            allowed="float32 or float64 parameters under fsdp, or bf16 and fp16 as plan terms",
            remedy="fsdp+bf16, which keeps float32 beside the half weights",
        )
    return dtypes


def _require_shardable(slot: Slot) -> None:
    if slot.parameter.is_meta:
        raise ConfigError(f"'{slot.name}' has no memory yet", allowed="models with memory under fsdp", remedy="zero3 for px.lazy() models")
    if not slot.parameter.dim():
        raise ConfigError(
            f"'{slot.name}' is a scalar, which fsdp cannot cut into rows", allowed="at least one dimension", remedy="zero3, or shape (1,)"
        )


def _require_recent_pytorch() -> None:
    if not all(hasattr(FSDPModule, name) for name in ("set_reduce_scatter_unused_params", "reset_iter_state")):
        raise ConfigError(
            f"fully_shard of PyTorch {torch.__version__} cannot sum what only some ranks used", allowed="PyTorch 2.13", remedy="zero3"
        )
