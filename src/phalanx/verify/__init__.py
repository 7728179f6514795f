"""Proof that a plan changes no number: `px.verify(model_fn, batch_fn, plan)` and what `phalanx verify` runs."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from phalanx.verify.report import Comparison, Report
from phalanx.verify.run import verify, verify_named
from phalanx.verify.tiny import NAMES

__all__ = ["NAMES", "Comparison", "Report", "verify", "verify_named"]


class _CallableModule(ModuleType):
    """`phalanx.verify` is this package and, for `px.verify(...)`, its function: importing a package binds its name to the module."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Report:
        return verify(*arguments, **keywords)


sys.modules[__name__].__class__ = _CallableModule
