"""One plan for every strategy: read from text or file, printed one way, checked for every conflict before anything starts."""

from phalanx.plan.fields import Budgets
from phalanx.plan.landed import LANDED
from phalanx.plan.plan import Plan, validate

__all__ = ["LANDED", "Budgets", "Plan", "validate"]
