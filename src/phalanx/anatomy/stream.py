"""Whether what flows between the projections of a block may be cut by features: proved on a small copy, in float64.

The stream may be cut where whatever takes it in (a norm, a projection, the end of a stack) depends, feature by feature, on the same
features of what gave it out. That is read from gradients: those from one half of the features in must not reach the other half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from phalanx.anatomy.proof import Proved
from phalanx.anatomy.specimen import Call, Specimen, is_linear, make_specimen, stacks_of

END, START = "the end of ", "the start of "


@dataclass
class StreamReading:
    """Where the stream of each stack cannot be cut, and why, by the names of modules.

    Of the projections in no group, `joining` give into the stream, and `inner` into others of their kind. Names are those of the blocks
    that stand for others of their kind, see `kinds`.
    """

    faults: dict[str, str] = field(default_factory=dict)
    joining: set[str] = field(default_factory=set)
    inner: set[str] = field(default_factory=set)
    kinds: dict[str, str] = field(default_factory=dict)

    def joins(self, name: str) -> bool:
        """Whether the output of the whole projection of this name belongs to the stream."""
        for block, stand_in in self.kinds.items():
            if name.startswith(f"{block}."):
                return stand_in + name[len(block) :] in self.joining
        return name in self.joining


def read_stream(model: nn.Module, seams: tuple[Proved, ...], call: Call | None = None) -> StreamReading:
    """Reads the streams of a model whose groups are known; the model is left as it is.

    Cost: a copy of the first layers, one forward, and one short backward for each module between projections.
    """
    with unset_fake_temporarily():  # also in a rehearsal the copy has numbers
        return _read(make_specimen(model, call), seams)


def _read(specimen: Specimen, seams: tuple[Proved, ...]) -> StreamReading:
    reading = StreamReading(kinds=dict(specimen.kinds))
    flow = _Flow(specimen, seams)
    for name, (kind, taken) in flow.taken.items():
        if kind == "row" or not taken.requires_grad:
            continue
        fault = _judge(flow, reading, name, kind, taken)
        if fault is not None:
            reading.faults[name] = fault
    both = reading.inner & reading.joining
    reading.faults |= dict.fromkeys(both, "its output belongs to the stream, and to a projection that takes it in whole")
    return reading


def _judge(flow: _Flow, reading: StreamReading, name: str, kind: str, taken: torch.Tensor) -> str | None:
    """Why what a module takes in cannot be cut, None where it can or need not be."""
    half = torch.rand(taken.shape, dtype=taken.dtype, generator=torch.Generator().manual_seed(taken.numel())) + 0.5
    half[..., taken.shape[-1] // 2 :] = 0
    reached = flow.gradients(taken, half)
    sources = {source: flow.given[source][0] for source in reached}
    if kind == "whole" and sources and all(source == "whole" for source in sources.values()):
        reading.inner.update(sources)  # within a run of whole projections
        return None
    if parameters := flow.loose_parameters(taken, half):
        return f"it takes in {parameters[0]}, which no module of its own reads"
    for source, gradient in reached.items():
        if not _is_aligned(gradient, taken):
            return f"it mixes features of {source}"
        if sources[source] == "whole":
            reading.joining.add(source)
    return None


def _is_aligned(gradient: torch.Tensor, taken: torch.Tensor) -> bool:
    half = taken.shape[-1] // 2
    return gradient.shape[-1] == taken.shape[-1] and not bool((gradient[..., half:] != 0).any())


class _Flow:
    """One forward in which what modules give out is cut loose; `taken` and `given` have (kind, tensor) by module name.

    Kinds: "norm" for modules with parameters between projections, "whole" for projections in no group, "column", "row", "stack".
    """

    def __init__(self, specimen: Specimen, seams: tuple[Proved, ...]):
        self.model = specimen.model
        self.taken: dict[str, tuple[str, torch.Tensor]] = {}
        self.given: dict[str, tuple[str, torch.Tensor]] = {}
        self.parameters = dict(self.model.named_parameters())
        self.owned: set[int] = set()
        hooks = self._hooks(seams)
        try:
            specimen.run()
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(self, seams: tuple[Proved, ...]) -> list[Any]:
        columns = {name for item in seams for name in item.group.columns if name not in item.group.beside}
        beside = {name for item in seams for name in item.group.beside}
        rows = {name for item in seams for name in item.group.rows}
        inside = {name for item in seams for name in item.group.parameters}
        self.owned |= {id(self.parameters[name]) for name in inside if name in self.parameters}
        hooks: list[Any] = []
        for stack, blocks in stacks_of(self.model):
            if not stack:
                continue
            hooks.append(blocks[0][1].register_forward_pre_hook(self._start(START + stack), with_kwargs=True))
            hooks.append(blocks[-1][1].register_forward_hook(self._end(END + stack)))
            for prefix, block in blocks:
                for relative, module in block.named_modules():
                    name = f"{prefix}.{relative}" if relative else prefix
                    kind = self._kind(name, module, columns, rows, beside, inside)
                    if kind is not None:
                        self.owned |= {id(parameter) for parameter in module.parameters(recurse=False)}
                        hooks.append(module.register_forward_hook(self._seen(name, kind), with_kwargs=True))
        return hooks

    def _kind(self, name: str, module: nn.Module, columns: set, rows: set, beside: set, inside: set) -> str | None:
        if name in columns:
            return "column"
        if name in rows:
            return "row"
        if name in beside or any(name == owner.rpartition(".")[0] for owner in inside):
            return "beside"
        if is_linear(module):
            return "whole"
        has_own = any(parameter is not None for parameter in module._parameters.values()) or hasattr(module, "normalized_shape")
        return "norm" if has_own and next(module.children(), None) is None else None

    def _seen(self, name: str, kind: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor | None:
            if kind == "beside" or name in self.taken or not isinstance(output, torch.Tensor):
                return None
            taken = args[0] if args else next(iter(kwargs.values()))
            if taken.is_floating_point():
                self.taken[name] = kind, taken.clone()
            return self._loosen(name, kind, output)

        return hook

    def _start(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            key = None if args else next(iter(kwargs))
            loose = self._loosen(name, "stack", args[0] if key is None else kwargs[key])
            return ((loose, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: loose})

        return hook

    def _end(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            self.taken[name] = "stack", (output[0] if isinstance(output, tuple | list) else output).clone()

        return hook

    def _loosen(self, name: str, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        loose = tensor.detach().requires_grad_()
        self.given[name] = kind, loose
        # Outputs of columns lead into groups, which were proved by themselves.
        return loose.clone() if kind != "column" else tensor.detach().requires_grad_().clone()

    def gradients(self, of: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
        targets = {name: tensor for name, (kind, tensor) in self.given.items() if kind != "column"}
        found = torch.autograd.grad(of, list(targets.values()), cotangent, retain_graph=True, allow_unused=True)
        return {name: grad for name, grad in zip(targets, found, strict=True) if grad is not None and bool((grad != 0).any())}

    def loose_parameters(self, of: torch.Tensor, cotangent: torch.Tensor) -> list[str]:
        """Parameters that are read between modules, and belong to no module that the stream passes."""
        targets = {name: parameter for name, parameter in self.parameters.items() if id(parameter) not in self.owned}
        if not targets:
            return []
        found = torch.autograd.grad(of, list(targets.values()), cotangent, retain_graph=True, allow_unused=True)
        return [name for name, grad in zip(targets, found, strict=True) if grad is not None]
