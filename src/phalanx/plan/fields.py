"""What a plan says: its fields, the values each may take, and the figures that follow from them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.errors import PlanError

AXES = ("dp", "pp", "cp", "tp")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zbv", "dualpipev", "auto-schedule")
TENSOR_KINDS = ("1d", "2d", "2.5d", "3d")
PLACEMENTS = ("auto", "static", "device", "host")
Recompute = str | float | None
_COUNTS = ("pp", "cp", "tp", "tp_depth", "ep", "acc", "interleaved")
_OPTIONAL_COUNTS = ("dp", "ulysses", "ring", "micro", "zero_group")
_SWITCHES = ("sp", "tp_outputs_move", "pp_keep", "chunked_loss", "offload", "gemini", "fsdp")
_CHOICES: dict[str, tuple[object, ...]] = {
    "tp_kind": TENSOR_KINDS,
    "zero": (0, 1, 2, 3),
    "precision": PRECISIONS,
    "schedule": SCHEDULES,
}


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """How much of each memory tier `gemini` may hold on every rank; None takes what is free.

    Units: bytes.
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    disk_path: str | None = None
    placement: str = "auto"

    def __post_init__(self) -> None:
        for name in ("device", "host", "disk"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and value > 0):
                raise PlanError(f"gemini budget {name} is {value!r}", allowed="a number of bytes above 0", remedy=f'{name} = "30GB"')
        if self.placement not in PLACEMENTS:
            raise PlanError(f"gemini placement is {self.placement!r}", allowed=", ".join(PLACEMENTS), remedy='placement = "auto"')
        if (self.disk is None) != (self.disk_path is None) or not isinstance(self.disk_path, str | None):
            raise PlanError("a disk budget needs both a size and a path", remedy='disk = "500GB" with disk_path = "/scratch"')


@dataclass(frozen=True, kw_only=True)
class PlanFields:
    """The choices of one plan, one field each.

    `dp` None takes what the world leaves, `micro` None is twice `pp`. `ulysses` and `ring` are None together: `cp` alone is named.
    `offload` keeps the optimizer's state in host memory. `recompute` is None, "full", "selective" or the fraction of layers; several
    of these (0 for nothing) are what each rank of a pipeline recomputes of its own layers, or each stage where ranks hold several.
    `interleaved` is the number of chunks that a stage holds under `1f1b`. `tp_keep` says whether what was gathered for a product (inputs
    under `sp`, inputs and weights on grids) is held for the backward or gathered again; None is each kind's own way: `sp` holds it, grids
    do not. `tp_outputs_move` (2d, 2.5d) moves the outputs of second products, which are narrower, not their inputs. `pp_keep` gathers a
    stage's parameters (zero3) and reduces its gradients (zero2, zero3) once per step, not once per micro-batch: least traffic, with a
    stage's parameters and local gradients held in full meanwhile. `chunked_loss` forms logits a few tokens at a time within the loss.

    Raises: PlanError, listing every field with a value it cannot have.
    """

    dp: int | None = None
    pp: int = 1
    cp: int = 1
    tp: int = 1
    tp_kind: str = "1d"
    tp_depth: int = 1
    tp_keep: bool | None = None
    tp_outputs_move: bool = False
    pp_keep: bool = False
    sp: bool = False
    ulysses: int | None = None
    ring: int | None = None
    ep: int = 1
    acc: int = 1
    micro: int | None = None
    schedule: str = "1f1b"
    interleaved: int = 1
    zero: int = 0
    zero_group: int | None = None
    gemini: bool = False
    budgets: Budgets | None = None
    offload: bool = False
    fsdp: bool = False
    precision: str = "fp32"
    recompute: Recompute | tuple[str | float, ...] = None
    chunked_loss: bool = False

    def __post_init__(self) -> None:
        raise_all(list(self._bad_values()))
        self._settle_context()
        if self.tp_keep is (self.tp_kind == "1d"):
            self._set(tp_keep=None)
        self._set(recompute=_settled(self.recompute))
        if self.budgets is not None and not self.gemini:
            raise PlanError("budgets are given without gemini", remedy="gemini = true, or leave the budgets out")
        if self.gemini and self.zero == 0:
            self._set(zero=3)

    def _settle_context(self) -> None:
        """Fills in what the named ones of cp, ulysses and ring leave out, so that equal plans compare equal."""
        if self.ulysses is None and self.ring is None:
            return
        ulysses, ring = self.ulysses or 1, self.ring or 1
        if self.cp == 1:
            self._set(cp=ulysses * ring)
        if self.cp == 1:
            self._set(ulysses=None, ring=None)
        else:
            self._set(ulysses=ulysses, ring=ring)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _bad_values(self) -> Iterator[PlanError]:
        for name in _COUNTS + _OPTIONAL_COUNTS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_COUNTS:
                continue
            if not _is_int(value) or value < 1:
                yield PlanError(f"{name} is {value!r}", allowed="a whole number from 1", remedy=f"{name} 2")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                yield PlanError(f"{name} is {getattr(self, name)!r}", allowed="true or false", remedy=f"{name} true")
        if not isinstance(self.tp_keep, bool | None):
            yield PlanError(f"tp_keep is {self.tp_keep!r}", allowed="true or false", remedy="leave tp_keep out")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices or type(value) is not type(choices[0]):
                known = [str(choice) for choice in choices]
                close = difflib.get_close_matches(str(value), known, n=1)
                yield PlanError(f"{name} is {value!r}", allowed=", ".join(known), remedy=f"{name} {close[0] if close else known[-1]}")
        if not _is_recompute(self.recompute):
            allowed = '"full", "selective", or a fraction above 0 and up to 1; for the ranks of a pipeline several, 0 where none'
            yield PlanError(f"recompute is {self.recompute!r}", allowed=allowed, remedy="recompute=0.5, or leave it out")
        if self.tp_depth != 1 and self.tp_kind != "2.5d":
            yield PlanError(f"tp_depth {self.tp_depth} with tp_kind {self.tp_kind}", allowed="a depth for 2.5d only", remedy="tp_depth 1")
        if self.interleaved != 1 and self.schedule != "1f1b":
            found = f"two schedules, {self.schedule} and interleaved{self.interleaved}"
            yield PlanError(found, allowed="one", remedy=f"interleaved{self.interleaved} alone")

    @property
    def num_micro(self) -> int:
        """The micro-batches of one pipeline pass: 2·pp unless the plan says otherwise, 1 without a pipeline."""
        return self.micro or (2 * self.pp if self.pp > 1 else 1)

    @property
    def num_chunks(self) -> int:
        """The model chunks that each pipeline rank holds."""
        return 2 if self.schedule in ("zbv", "dualpipev") else self.interleaved

    def recompute_of(self, stage: int, rank: int) -> Recompute:
        """What a stage of the pipeline recomputes, by its number and the rank that holds it."""
        if not isinstance(self.recompute, tuple):
            return self.recompute
        return self.recompute[rank if len(self.recompute) == self.pp else stage]

    @property
    def keeps_gathered(self) -> bool:
        """Whether inputs (on grids also weights) that tensor parallelism has gathered are held for the backward."""
        return self.tp_kind == "1d" if self.tp_keep is None else self.tp_keep

    @property
    def tensor_axes(self) -> dict[str, int]:
        """The axes that `tp` consists of, outermost first: one, or those of a grid, of which the first but for `depth` takes rows."""
        if self.tp_kind == "1d":
            return {"tp": self.tp}
        side = round((self.tp / self.tp_depth) ** (1 / 3 if self.tp_kind == "3d" else 1 / 2))
        grid = {"row": side, "col": side}
        return {"2d": grid, "2.5d": {"depth": self.tp_depth, **grid}, "3d": {"plane": side, **grid}}[self.tp_kind]

    @property
    def model_size(self) -> int:
        """pp·cp·tp: the ranks of one data index."""
        return self.pp * self.cp * self.tp

    def data_index_count(self, world: int | None) -> int | None:
        """The size of dp where the plan or the world tells it, else None (also where the world does not fit)."""
        if world is None:
            return self.dp
        count, rest = divmod(world, self.model_size)
        return None if rest or count == 0 or self.dp not in (None, count) else count

    def context_grid(self, num_heads: int | None = None) -> tuple[int, int]:
        """The (ulysses, ring) sizes: as named, else the largest Ulysses whose ranks get whole key-value heads of this tensor rank.

        Ulysses moves fewer bytes than the ring; with `num_heads` (key-value heads of the model) unknown, all of cp is a ring.
        """
        if self.ulysses is not None and self.ring is not None:
            return self.ulysses, self.ring
        heads = num_heads // self.tp if num_heads and num_heads % self.tp == 0 else 1
        ulysses = math.gcd(self.cp, heads)
        return ulysses, self.cp // ulysses


def raise_all(problems: list[PlanError], subject: str = "the plan") -> None:
    """Raises one PlanError that tells all of `problems`; does nothing where there are none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)]
        raise PlanError("\n".join([f"{subject} has {len(problems)} faults:", *lines]))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_recompute(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) > 1 and any(value) and all(map(_is_recompute_of_a_stage, value))
    return value is None or (bool(value) and _is_recompute_of_a_stage(value))


def _is_recompute_of_a_stage(value: object) -> bool:
    if isinstance(value, str):
        return value in ("full", "selective")
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _settled(value: Any) -> Any:
    """One way to say that all of the layers recompute."""
    if isinstance(value, list | tuple):
        return tuple(map(_settled, value))
    return "full" if value == 1 else value
