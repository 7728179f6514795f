"""`Plan`: the only thing that differs between a laptop and a thousand devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import PlanError
from phalanx.plan import file, text
from phalanx.plan.check import conflicts
from phalanx.plan.fields import PlanFields, raise_all
from phalanx.plan.landed import not_landed


@dataclass(frozen=True, kw_only=True)
class Plan(PlanFields):
    """How a model is trained on a world of ranks: the choices of `PlanFields`, with their text form, file form and checks.

    `Plan.parse(str(plan)) == plan` for every plan that the text can say, `Plan.from_table` and `to_toml` do so for all.
    """

    @classmethod
    def parse(cls, plan_text: str) -> Plan:
        """The plan that a text such as `zero1+tp2+pp4` names.

        Raises: PlanError, listing every term that cannot be read and every conflict among those that can.
        """
        fields, problems = text.read(plan_text)
        return cls._build(fields, problems, f"plan {plan_text!r}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Plan:
        """The plan that a table of keys says, as a recipe or a plan file holds it."""
        fields, problems = file.read_table(table)
        return cls._build(fields, problems, "the plan's table")

    @classmethod
    def from_toml(cls, path: str | Path) -> Plan:
        """The plan that a TOML file says."""
        fields, problems = file.read_table(file.read_file(path))
        return cls._build(fields, problems, f"the plan of {path}")

    @classmethod
    def of(cls, value: Plan | str | Path | Mapping[str, Any]) -> Plan:
        """The plan that a person gave in whichever form: a plan, its text, a path that ends in `.toml`, or its table."""
        if isinstance(value, Plan):
            return value
        if isinstance(value, Path) or (isinstance(value, str) and value.endswith(".toml")):
            return cls.from_toml(value)
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Mapping):
            return cls.from_table(value)
        raise PlanError(
            f"a plan is given as {type(value).__name__}", allowed="a Plan, its text, its file, or a table", remedy='"zero1+bf16"'
        )

    @classmethod
    def _build(cls, fields: dict[str, Any], problems: list[PlanError], subject: str) -> Plan:
        plan = None
        try:
            plan = cls(**fields)
        except PlanError as problem:
            problems = [*problems, problem]
        if problems and plan is not None:
            problems = [*problems, *conflicts(plan)]
        raise_all(problems, subject)
        assert plan is not None
        return plan

    def __str__(self) -> str:
        return text.print_plan(self)

    def to_toml(self) -> str:
        """The TOML that `from_toml` reads back as an equal plan."""
        return file.print_table(self)

    def sizes(self, world: int) -> dict[str, int]:
        """The size of each mesh axis on a world of this many ranks, outermost to innermost.

        Raises: PlanError where the world does not fit.
        """
        dp = self.data_index_count(world)
        if dp is None:
            raise_all(conflicts(self, None, world), f"plan {self} on world {world}")
        assert dp is not None
        return {"dp": dp, "pp": self.pp, "cp": self.cp, "tp": self.tp}

    def axes(self, world: int) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
        """The sizes of all mesh axes, those of a grid one by one, and which of them form `tp`."""
        sizes = self.sizes(world)
        del sizes["tp"]
        return {**sizes, **self.tensor_axes}, {"tp": tuple(self.tensor_axes)}

    def default_world(self) -> int:
        """The fewest ranks on which every term has something to do: 2 data indexes where state is sharded or no axis is named."""
        if self.dp is not None:
            return self.dp * self.model_size
        shards, dp = self.cp * self.tp_depth, 1
        if self.zero_group is not None:
            dp = 2 * self.zero_group // math.gcd(self.zero_group, shards)
        elif self.zero or self.fsdp or self.model_size * self.ep == 1:
            dp = 2
        return math.lcm(dp, self.ep // math.gcd(self.ep, self.cp)) * self.model_size

    def check(self, anatomy: object | None = None, world: int | None = None) -> list[str]:
        """Every conflict of the plan with itself, the model and the world, each as found, allowed and one value that works."""
        return [str(conflict) for conflict in conflicts(self, anatomy, world)]

    def require(self, anatomy: object | None = None, world: int | None = None) -> None:
        """Does nothing if this plan can run, here and now.

        Raises: PlanError, telling every conflict and every term whose strategy has not landed.
        """
        raise_all([*conflicts(self, anatomy, world), *not_landed(self)], f"plan {self}")


def validate(value: str | Mapping[str, Any], anatomy: object | None = None, world: int | None = None) -> list[str]:
    """Everything that is wrong with a plan's text or table, its terms and its conflicts in one list; empty where it would run."""
    fields, problems = text.read(value) if isinstance(value, str) else file.read_table(value)
    try:
        plan = Plan(**fields)
    except PlanError as problem:
        return [str(fault) for fault in [*problems, problem]]
    return [str(fault) for fault in [*problems, *conflicts(plan, anatomy, world), *not_landed(plan)]]
