"""Which dtype each number has: the policy of a plan's precision term, and the lift of casts that verification runs under."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from phalanx.errors import PlanError

HALF = (torch.bfloat16, torch.float16)
COMPUTE = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class DTypes:
    """The dtypes of one parameter: in forward and backward, in the optimizer, of its accumulated gradient, and on the wire."""

    compute: torch.dtype
    master: torch.dtype
    gradient: torch.dtype
    reduce: torch.dtype

    @property
    def has_master(self) -> bool:
        """Whether the optimizer holds a copy beside the weight that computes."""
        return self.master != self.compute


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The policy of one precision term; `compute` is None where every tensor keeps the dtype the program gave it."""

    term: str
    compute: torch.dtype | None

    @classmethod
    def of(cls, term: str) -> Precision:
        """The policy of a plan's precision term.

        Raises: PlanError for a term without a policy.
        """
        if term not in COMPUTE:
            raise PlanError(f"precision '{term}' is not available", allowed=", ".join(COMPUTE), remedy="bf16")
        return cls(term=term, compute=COMPUTE[term])

    @property
    def scales_loss(self) -> bool:
        """Whether gradients can underflow in the compute dtype, so that the loss needs a scale."""
        return self.compute == torch.float16

    def for_parameter(self, dtype: torch.dtype) -> DTypes:
        """The dtypes of a parameter that the model holds in `dtype`.

        float64, complex and integer parameters keep their dtype under every term; half gradients always accumulate and
        are reduced in float32, since a half sum over many passes or ranks loses the small terms.
        """
        master = torch.float32 if self.compute is not None and dtype in HALF else dtype
        compute = self.compute if self.compute is not None and master == torch.float32 else dtype
        gradient = torch.float32 if compute in HALF else dtype
        return DTypes(compute=compute, master=master, gradient=gradient, reduce=gradient)

    def cast_inputs(self, batch: Any) -> Any:
        """The batch with its float32 and half tensors in the compute dtype; everything else is passed as it is.

        Mappings come back as plain dicts; tuples, named tuples and lists keep their type.
        """
        compute = self.compute
        if compute is None:
            return batch
        return _map_tensors(lambda t: t.to(compute) if t.dtype == torch.float32 or t.dtype in HALF else t, batch)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(function, item) for item in value)
    return value


# Every spelling of "float32" that reaches a torch function as an argument.
_TENSOR_TYPE = type(torch.FloatTensor)
_FLOAT32 = frozenset({torch.float32, torch.FloatTensor, "torch.FloatTensor"})


class lift_to_float64(TorchFunctionMode):
    """A context in which every cast to float32 yields float64, so that a float64 model has no float32 number inside.

    Norms, rotary tables, softmax and losses of many models compute in float32 whatever their input is; comparisons to 1e-9
    need those lifted on both sides. Creation without a dtype is covered too: the default dtype is float64 inside (it is
    process-wide). Run the backward inside the context too where activations are recomputed, since their forward runs there again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outer_defaults: list[torch.dtype] = []

    def __enter__(self) -> lift_to_float64:
        self._outer_defaults.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        torch.set_default_dtype(self._outer_defaults.pop())
        super().__exit__(*failure)

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.float:
            return args[0].to(torch.float64, **kwargs)
        if function is torch.Tensor.backward:
            return self._backward(args[:1], kwargs.pop("gradient", None), **kwargs)
        if function is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        if function is torch.autograd.grad and not kwargs.get("materialize_grads"):
            outputs, inputs = args
            with self:
                return function(_edges(outputs), _edges(inputs), **kwargs)
        return function(*map(_lift, args), **{name: _lift(value) for name, value in kwargs.items()})

    def _backward(self, tensors: Any, grad_tensors: Any = None, *, inputs: Any = None, **kwargs: Any) -> None:
        """Runs a backward with this mode on.

        torch takes the mode off while it hands a call over to it, so a recomputed forward would not see it. Graph edges
        stand for the tensors, because a call on edges is not handed over once more.
        """
        with self:
            torch.autograd.backward(_edges(tensors), grad_tensors, inputs=inputs and _edges(inputs), **kwargs)


def _edges(tensors: Any) -> tuple[GradientEdge, ...]:
    return tuple(item if isinstance(item, GradientEdge) else get_gradient_edge(item) for item in tensors)


def _lift(value: Any) -> Any:
    if isinstance(value, (torch.dtype, str, _TENSOR_TYPE)) and value in _FLOAT32:
        return torch.float64
    return value
