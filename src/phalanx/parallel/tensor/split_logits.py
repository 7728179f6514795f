"""Logits in parts of the vocabulary behind a stand-in of their full shape, so that a model's own code and loss work on them unchanged.

A stand-in has the memory of one row, and reads NaN. What a step does with it is done to what is behind it: views, casts and
elementwise arithmetic to this rank's part, and cross entropy without ever joining the parts. Anything else gets whole logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import PlanError
from phalanx.kernels.linear_cross_entropy import linear_cross_entropy_sum
from phalanx.kernels.split_cross_entropy import ALONE, Across, split_cross_entropy
from phalanx.layout import STANDS_FOR, split_range, split_sizes

Losses = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
_WHOLE, _LOSSES, _IS_VIEWED = "_phalanx_whole", "_phalanx_losses", "_phalanx_is_viewed"


class SplitLogits:
    """Makes stand-ins and acts for them; `axis` has the ranks with the other parts of the vocabulary.

    Stand-ins are made while a `reading` is under way, and are sound inside of it alone.
    """

    def __init__(self, axis: Axis):
        self.axis = axis
        self._scope: ExitStack | None = None
        self._depth = 0
        self._is_acting = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is done with logits inside is seen here, and none of it later."""
        outer = self._scope, self._depth, self._is_acting
        try:
            with ExitStack() as self._scope:
                self._depth, self._is_acting = torch._C._len_torch_function_stack(), False
                yield
        finally:
            self._scope, self._depth, self._is_acting = outer

    def can_stand_in(self, size: int) -> bool:
        """Whether a stand-in would be seen until the reading ends: another mode that the model has entered leaves before."""
        depth = torch._C._len_torch_function_stack() - self._is_acting
        return self._scope is not None and size > 1 and depth == self._depth and not torch.compiler.is_compiling()

    def stand_in(self, local: torch.Tensor, size: int, losses: Losses | None = None) -> torch.Tensor:
        """The stand-in of logits over `size` tokens, of which this rank has `local`.

        With `losses`, `local` is what is multiplied to logits, and `losses(local, labels, ignore_index)` sums their losses.
        """
        if not self._is_acting:
            assert self._scope is not None
            self._scope.enter_context(_Acting(self))
            self._is_acting = True
        return _make(local, local.dim() - 1, size, losses)

    def causal_sum(self, logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The summed losses and their count for logits and labels of the same tokens; None for plain logits."""
        dim = _vocabulary_dim(logits)
        if dim is None or hasattr(logits, _WHOLE):
            return None
        local = _behind(logits).movedim(dim, -1)
        losses = getattr(logits, _LOSSES, None)
        if losses is not None:
            return losses(local, labels, ignore_index)
        labels_N = labels.reshape(-1)
        found = split_cross_entropy(local.reshape(-1, local.shape[-1]), labels_N, self.across(logits.shape[dim]), ignore_index)
        return found.sum(), (labels_N != ignore_index).sum()

    def plain(self, logits: torch.Tensor) -> torch.Tensor:
        """Whole logits for a loss, whatever these are."""
        return self.whole(logits, "the loss") if hasattr(logits, STANDS_FOR) else logits

    def across(self, size: int) -> Across:
        if self.axis.size == 1:
            return ALONE
        low, _ = split_range(size, self.axis.size, self.axis.index)
        widest = -(-size // self.axis.size)
        return Across(
            low,
            widest,
            size,
            lambda tensor: comm.all_reduce(tensor, self.axis, op="max"),
            lambda tensor: comm.all_reduce(tensor, self.axis),
        )

    def whole(self, stand_in: torch.Tensor, reader: str) -> torch.Tensor:
        """All logits, joined once, for `reader`."""
        if not hasattr(stand_in, _WHOLE):
            if hasattr(stand_in, _LOSSES):
                raise PlanError(
                    f"chunked_loss keeps no logits, and the model or its criterion asks for them ({reader})",
                    allowed="logits that go into the loss as they are",
                    remedy="leave chunked_loss out",
                )
            dim = _vocabulary_dim(stand_in)
            assert dim is not None
            sizes = split_sizes(stand_in.shape[dim], self.axis.size)
            setattr(stand_in, _WHOLE, comm.gather_from(_behind(stand_in), self.axis, dim, sizes).contiguous())
        return getattr(stand_in, _WHOLE)


class _Acting(TorchFunctionMode):
    """Sees every operation while a reading is under way."""

    def __init__(self, logits: SplitLogits):
        super().__init__()
        self.logits = logits

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        found = list(_stand_ins([*args, *kwargs.values()]))
        if not found:
            return function(*args, **kwargs)
        result = NotImplemented
        if not any(hasattr(each, _WHOLE) for each in found):
            result = self._act(function, found, args, kwargs)
        if result is not NotImplemented:
            return result
        name = getattr(function, "__name__", str(function))
        if _is_in_place(name, kwargs) and any(hasattr(each, _IS_VIEWED) for each in found):
            raise PlanError(
                f"logits that are split by vocabulary are changed in place ({name}) where something else looks at them as well",
                allowed="operations that make new tensors",
                remedy="a plan without tp",
            )
        whole = lambda value: _mapped(value, lambda each: self.logits.whole(each, name))  # noqa: E731
        return function(*whole(args), **whole(kwargs))

    def _act(self, function: Any, found: Sequence[torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", "")
        if name in _QUESTIONS or (name == "__get__" and getattr(function.__self__, "__name__", "") in _QUESTIONS):
            return function(*args, **kwargs)
        if function is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if len(found) > 1 or not args or args[0] is not found[0]:
            return self._arithmetic(function, args, kwargs) if name in _ARITHMETIC else NotImplemented
        if name in _VIEWS:
            return _view(function, args, kwargs)
        if name in _COPIES:
            return _copy(function, args, kwargs)
        return self._arithmetic(function, args, kwargs) if name in _ARITHMETIC else NotImplemented

    def _arithmetic(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Of each feature by itself; what else takes part may have one number for each token of the vocabulary, but nothing to learn."""
        stand_in = next(_stand_ins([*args, *kwargs.values()]))
        dim, size = _vocabulary_dim(stand_in), stand_in.shape[_vocabulary_dim(stand_in)]  # type: ignore[index]
        if hasattr(stand_in, _LOSSES):
            return NotImplemented
        taken: list[Any] = []
        for value in args:
            if not isinstance(value, torch.Tensor):
                taken.append(value)
                continue
            if hasattr(value, STANDS_FOR):
                if value.shape != stand_in.shape or _vocabulary_dim(value) != dim:
                    return NotImplemented
                taken.append(_behind(value))
                continue
            place = dim - stand_in.dim() + value.dim()  # type: ignore[operator]
            if value.requires_grad or value.dim() > stand_in.dim():
                return NotImplemented
            if place >= 0 and value.shape[place] == size:
                low, high = split_range(size, self.logits.axis.size, self.logits.axis.index)
                value = value.narrow(place, low, high - low)
            taken.append(value)
        if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
            return NotImplemented
        return _make(function(*taken, **kwargs), dim, size)  # type: ignore[arg-type]

    def _cross_entropy(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        """PyTorch's, on logits (N, V) or (N, V, ...) in parts."""
        dim = 1 if input.dim() > 1 else 0
        is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
        if not is_plain or _vocabulary_dim(input) != dim or hasattr(target, STANDS_FOR) or target.is_floating_point():
            return NotImplemented
        if reduction == "none":
            if hasattr(input, _LOSSES):
                return NotImplemented
            local = _behind(input).movedim(dim, -1)
            across = self.logits.across(input.shape[dim])
            return split_cross_entropy(local.reshape(-1, local.shape[-1]), target.reshape(-1), across, ignore_index).view(target.shape)
        found = self.logits.causal_sum(input, target, ignore_index)
        assert found is not None
        return found[0] if reduction == "sum" else found[0] / found[1]


def head_losses(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, across: Across, labels: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a stand-in without logits sums its losses by."""
    return linear_cross_entropy_sum(x, weight, labels.to(x.device), bias, ignore_index, across)


def _make(local: torch.Tensor, dim: int, size: int, losses: Losses | None = None) -> torch.Tensor:
    """A stand-in for logits of which `local` is this rank's part along `dim`; only that dimension has a stride."""
    others = [*local.shape[:dim], *local.shape[dim + 1 :]]
    made = torch.full((size,), math.nan, dtype=local.dtype, device=local.device).expand(*others, size).movedim(-1, dim)
    setattr(made, STANDS_FOR, local)
    if losses is not None:
        setattr(made, _LOSSES, losses)
    return made


def _behind(stand_in: torch.Tensor) -> torch.Tensor:
    return getattr(stand_in, STANDS_FOR)


def _vocabulary_dim(tensor: torch.Tensor) -> int | None:
    """The dimension of a stand-in that counts tokens of the vocabulary; None for any other tensor."""
    if not hasattr(tensor, STANDS_FOR):
        return None
    with torch._C.DisableTorchFunction():
        return _strided_dim(tensor, None)


def _strided_dim(tensor: torch.Tensor, size: int | None) -> int | None:
    """The one dimension of several entries that has a stride, where it has `size` entries."""
    pairs = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    found = [dim for dim, (extent, stride) in pairs if stride == 1 and extent > 1 and size in (None, extent)]
    return found[0] if len(found) == 1 else None


def _view(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Another look at the stand-in, and at what is behind it; NotImplemented where the vocabulary does not stay one dimension."""
    stand_in = args[0]
    dim, local = _vocabulary_dim(stand_in), _behind(stand_in)
    size = stand_in.shape[dim]  # type: ignore[index]
    try:
        seen = function(*args, **kwargs)
    except RuntimeError:  # the vocabulary cannot become a part of another dimension without a copy
        return NotImplemented
    if not isinstance(seen, torch.Tensor) or seen.untyped_storage()._cdata != stand_in.untyped_storage()._cdata:
        return NotImplemented
    place = _strided_dim(seen, size)
    if place is None:
        return NotImplemented
    wanted = [*seen.shape[:place], local.shape[dim], *seen.shape[place + 1 :]]  # type: ignore[index]
    if function.__name__ in _SHAPES:
        if math.prod(seen.shape[:place]) != math.prod(stand_in.shape[:dim]):
            return NotImplemented
        found = local.reshape(wanted)
    elif function.__name__ == "narrow" and seen.shape == stand_in.shape:
        found = local  # all there is, which may be more than is here
    else:
        found = function(local, *args[1:], **kwargs)
    if list(found.shape) != wanted:
        return NotImplemented
    setattr(stand_in, _IS_VIEWED, True)
    made = _make(found, place, size, getattr(stand_in, _LOSSES, None))
    setattr(made, _IS_VIEWED, True)
    return made


def _copy(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The same logits in another dtype, place or memory."""
    stand_in = args[0]
    dim, losses = _vocabulary_dim(stand_in), getattr(stand_in, _LOSSES, None)
    # A loss of its own forms logits in the dtype of the weights and sums in full precision, whatever they are cast to.
    found = _behind(stand_in) if losses is not None else function(_behind(stand_in), *args[1:], **kwargs)
    if found is _behind(stand_in):
        return stand_in  # what needs no copy is given out itself
    made = _make(found, dim, stand_in.shape[dim], losses)  # type: ignore[arg-type, index]
    if function.__name__ == "detach":
        for each in (stand_in, made):
            setattr(each, _IS_VIEWED, True)
    return made


def _stand_ins(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if hasattr(value, STANDS_FOR):
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _stand_ins(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _stand_ins(item)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value) if hasattr(value, STANDS_FOR) else value
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def _is_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    return name in _WRITES or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))


_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_SHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})
_VIEWS = _SHAPES | {"transpose", "permute", "movedim", "swapaxes", "swapdims", "narrow", "select", "__getitem__"}
_COPIES = frozenset({"contiguous", "clone", "detach", "to", "type", "float", "double", "half", "bfloat16"})
_ARITHMETIC = frozenset(
    {
        *("add", "sub", "rsub", "mul", "div", "true_divide", "multiply", "divide", "subtract", "neg", "tanh", "__add__", "__radd__"),
        *("__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__"),
    }
)
_QUESTIONS = frozenset(
    {
        *("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "names", "__hash__"),
        *("size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_contiguous", "get_device", "__len__"),
    }
)
