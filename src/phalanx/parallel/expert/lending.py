"""All experts on every rank for a while, as generation needs them: ranks then run different numbers of passes and exchange nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from phalanx.layout import Layout


class DividedForward(Protocol):
    """The forward of a layer whose experts are divided; while `has_all` this rank holds all of them."""

    has_all: bool


@dataclass(frozen=True)
class Loan:
    """A parameter of experts that is divided: its logical name, and what of it a rank holds while it has all experts."""

    name: str
    module: nn.Module
    attribute: str
    layout: Layout


@dataclass
class Lending:
    """What is lent, and the forwards that then compute alone. `names` has the logical names of all parameters by their owners."""

    names: Mapping[tuple[nn.Module, str], str]
    loans: list[Loan] = field(default_factory=list)
    forwards: list[DividedForward] = field(default_factory=list)

    def add(self, module: nn.Module, attribute: str, layout: Layout) -> None:
        self.loans.append(Loan(self.names[module, attribute], module, attribute, layout))

    @contextmanager
    def everything(self, full_parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> Iterator[None]:
        """Every rank holds all experts inside. Collective. Cost: their bytes in compute dtype."""
        kept = [(loan, loan.module._parameters[loan.attribute]) for loan in self.loans]
        by_name: dict[str, list[tuple[Loan, nn.Parameter | None]]] = {}
        for loan, own in kept:
            by_name.setdefault(loan.name, []).append((loan, own))
        try:
            for name, value in full_parameters() if self.loans else ():
                for loan, own in by_name.get(name, ()):
                    assert own is not None
                    lent = loan.layout.take(value).to(own.dtype, copy=True)
                    loan.module._parameters[loan.attribute] = nn.Parameter(lent, requires_grad=False)
            self._say(True)
            yield
        finally:
            self._say(False)
            for loan, own in kept:
                loan.module._parameters[loan.attribute] = own

    def _say(self, has_all: bool) -> None:
        for forward in self.forwards:
            forward.has_all = has_all
