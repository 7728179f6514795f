"""What a norm computes, found by trying it out: so that its rows can be normalised where their features lie on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from phalanx.anatomy.specimen import fresh_tensors

ROWS = 5
TOLERANCE = 1e-5  # many norms compute in float32, whatever they are given


@dataclass(frozen=True)
class Norm:
    """unit(x) * (offset + scale) + shift, with the names of the parameters, None where there is none.

    `is_centred` tells a LayerNorm from an RMSNorm. `eps` None is the smallest step of the dtype.
    """

    is_centred: bool
    eps: float | None
    scale: str | None
    offset: float
    shift: str | None

    def __call__(self, x: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """The definition, on whole rows."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        x = x - x.mean(-1, keepdim=True) if self.is_centred else x
        return self.scaled(x * (x.square().mean(-1, keepdim=True) + eps).rsqrt(), parameters)

    def scaled(self, unit: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """What follows once rows are normalised; it takes each feature by itself."""
        if self.scale is not None:
            unit = unit * (parameters[self.scale] + self.offset if self.offset else parameters[self.scale])
        return unit if self.shift is None else unit + parameters[self.shift]


def read_norm(module: nn.Module) -> Norm | None:
    """The norm that a module computes, None where it is none that is known.

    Cost: a few dozen forwards on five rows. The module is left as it is.
    """
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    width = _width(module, names)
    if width is None or next(module.children(), None) is not None:
        return None
    with unset_fake_temporarily(), torch.no_grad():
        trial = copy.deepcopy(module, fresh_tensors(module)).eval()
        parameters = dict(trial.named_parameters())
        generator = torch.Generator().manual_seed(3)
        # The first rows are so small that what is added to their variance shows.
        x = torch.randn(ROWS, width, dtype=torch.float64, generator=generator) * torch.logspace(-4, 0, ROWS, dtype=torch.float64)[:, None]
        x = x + 0.1 * x.abs().amax(-1, keepdim=True)
        try:
            found = trial(x)
        except Exception:  # whatever it takes, it is not rows of features alone
            return None
        if not isinstance(found, torch.Tensor) or found.shape != x.shape:
            return None
        return next((norm for norm in _candidates(module, names) if _agree(norm(x, parameters), found)), None)


def _width(module: nn.Module, names: list[str]) -> int | None:
    """The features of a row: the size of its parameters, all of one dimension."""
    shapes = {tuple(module._parameters[name].shape) for name in names}  # type: ignore[union-attr]
    if not shapes:
        shapes = {tuple(getattr(module, "normalized_shape", ()))}
    return next(iter(shapes))[0] if len(shapes) == 1 and len(next(iter(shapes))) == 1 else None


def _candidates(module: nn.Module, names: list[str]) -> Iterator[Norm]:
    small: list[float | None] = [value for value in vars(module).values() if type(value) is float and value < 0.1]
    pairs: list[tuple[str | None, str | None]] = [(one, other) for one in names for other in names if one != other]
    if len(names) < 2:
        pairs = [(names[0] if names else None, None)]
    for is_centred in (True, False):
        for eps in dict.fromkeys([*small, None, 0.0]):
            for scale, shift in pairs:
                for offset in (0.0, 1.0) if scale is not None else (0.0,):
                    yield Norm(is_centred, eps, scale, offset, shift)


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one - other).abs() <= TOLERANCE * other.abs().amax(-1, keepdim=True)).all())
