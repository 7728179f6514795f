"""One plan for every strategy: read from text or file, printed one way, checked for every conflict before anything starts."""

from .fields import Budgets
from .landed import LANDED
from .plan import Plan, validate

__all__ = ["LANDED", "Budgets", "Plan", "validate"]
