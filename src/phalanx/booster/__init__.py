"""What people call: `Booster`, and the plugins that name common plans."""

from phalanx.booster.booster import Booster
from phalanx.booster.result import Result

__all__ = ["Booster", "Result"]
