"""The text form of a plan: `zero1+tp2+pp4`.

Terms are split at `+` or white space only, and each matches whole: an exact word, or the longest name followed by its number.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from phalanx.errors import PlanError
from phalanx.plan.fields import PRECISIONS, SCHEDULES, PlanFields

# Each exact word: the family of terms it belongs to (a plan takes one term of each family), and the fields it sets.
_WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{word: ("schedule", {"schedule": word}) for word in SCHEDULES},
    **{word: ("precision", {"precision": word}) for word in PRECISIONS},
    "sp": ("sp", {"sp": True}),
    "recompute": ("recompute", {"recompute": "full"}),
    "selective": ("recompute", {"recompute": "selective"}),
    "offload": ("offload", {"offload": True}),
    "gemini": ("gemini", {"gemini": True}),
    "fsdp": ("fsdp", {"fsdp": True}),
}
# Each name that a number follows, with an example; the family is the name, but for interleaved.
_NAMES = {
    "dp": "dp4",
    "pp": "pp4",
    "cp": "cp4",
    "tp": "tp2",
    "ep": "ep8",
    "acc": "acc4",
    "micro": "micro8",
    "interleaved": "interleaved2",
    "ulysses": "ulysses2",
    "ring": "ring2",
    "zero": "zero1",
}
_NUMBERED = re.compile(rf"({'|'.join(sorted(_NAMES, key=len, reverse=True))})([0-9]{{1,9}})")
_TENSOR = re.compile(r"tp([0-9]{1,9}):(2d|2\.5d([0-9]{1,9})|3d)")
_ZERO = re.compile(r"zero([0-9]{1,9})(?::([0-9]{1,9}))?")
_RECOMPUTE_OF_A_STAGE = r"(?:full|selective|[0-9]*\.?[0-9]+(?:e-?[0-9]{1,3})?)"
_RECOMPUTE = re.compile(rf"recompute=({_RECOMPUTE_OF_A_STAGE}(?:,{_RECOMPUTE_OF_A_STAGE})*)")


def read(text: str) -> tuple[dict[str, Any], list[PlanError]]:
    """The fields that a plan text sets, and everything in it that cannot be read.

    A term that cannot be read sets nothing, so that the rest can still be checked.
    """
    fields: dict[str, Any] = {}
    problems: list[PlanError] = []
    seen: dict[str, str] = {}
    for token in _tokens(text, problems):
        try:
            family, values = _read_term(token)
        except PlanError as problem:
            problems.append(problem)
            continue
        if family in seen:
            problems.append(_twice(family, seen[family], token))
            continue
        seen[family] = token
        fields.update(values)
    problems += overruled(fields)
    return fields, problems


def overruled(fields: dict[str, Any]) -> Iterable[PlanError]:
    """The settings at their default that another contradicts: a plan cannot tell them from none, so they are refused here."""
    for name in ("gemini", "fsdp"):
        if fields.get(name) and fields.get("zero") == 0:
            yield PlanError(f"zero0 with {name}, which shards the parameters", remedy=f"{name} alone")
    for name in ("ulysses", "ring"):
        if fields.get("cp") == 1 and (fields.get(name) or 1) != 1:
            yield PlanError(f"cp1 with {name}{fields[name]}", allowed="cp = ulysses · ring", remedy=f"{name}{fields[name]} alone")


def _tokens(text: str, problems: list[PlanError]) -> Iterator[str]:
    if not text.strip():
        problems.append(PlanError("the plan text is empty", remedy="zero0, which is plain data parallelism"))
        return
    for part in text.split("+"):
        if not part.strip():
            problems.append(PlanError(f"an empty term in {text!r}", allowed="terms with one + or white space between", remedy="zero1+bf16"))
        yield from part.split()


def _read_term(token: str) -> tuple[str, dict[str, Any]]:
    """The family of one term and the fields it sets."""
    if token in _WORDS:
        return _WORDS[token]
    if match := _TENSOR.fullmatch(token):
        size, kind, depth = match.groups()
        kind_fields = {"tp_kind": "2.5d", "tp_depth": _count(token, depth)} if depth else {"tp_kind": kind}
        return "tp", {"tp": _count(token, size), **kind_fields}
    if match := _ZERO.fullmatch(token):
        return "zero", _zero_fields(token, *match.groups())
    if match := _NUMBERED.fullmatch(token):
        name, number = match.groups()
        return "schedule" if name == "interleaved" else name, {name: _count(token, number)}
    if match := _RECOMPUTE.fullmatch(token):
        return "recompute", {"recompute": _read_recompute(token, match[1].split(","))}
    raise _unreadable(token)


def _zero_fields(token: str, stage: str, group: str | None) -> dict[str, Any]:
    if int(stage) > 3:
        raise PlanError(f"{token} has no such stage", allowed="zero0, zero1, zero2, zero3", remedy="zero3")
    return {"zero": int(stage)} | ({"zero_group": _count(token, group)} if group else {})


def _read_recompute(token: str, stages: list[str]) -> Any:
    values = [word if word in ("full", "selective") else float(word) for word in stages]
    fractions = [value for value in values if isinstance(value, float)]
    if not any(values) or any(fraction > 1 for fraction in fractions):
        allowed = "above 0 and up to 1" if len(values) == 1 else "0 to 1, not all of them 0"
        raise PlanError(f"{token} is no fraction of the layers", allowed=allowed, remedy="recompute=0.5, or leave it out")
    return tuple(values) if len(values) > 1 else values[0]


def _count(token: str, number: str) -> int:
    if int(number) < 1:
        example = re.sub("[0-9]+$|(?<=tp)[0-9]+", "2", token)
        raise PlanError(f"{token} has a size of 0", allowed="a whole number from 1", remedy=example)
    return int(number)


def _twice(family: str, first: str, second: str) -> PlanError:
    if first == second:
        return PlanError(f"{first} is given twice", allowed="each term once", remedy=f"{first} once")
    if family == "schedule":
        return PlanError(f"two schedules, {first} and {second}", allowed="one", remedy=f"{first} alone")
    if family in ("precision", "recompute"):
        return PlanError(f"{first} and {second} both choose the {family}", allowed="one", remedy=f"{first} alone")
    return PlanError(f"{first} and {second} both set {family}", allowed="each term once", remedy=f"{first} alone")


def _unreadable(token: str) -> PlanError:
    """The error for a term that matches nothing, with the nearest that would."""
    if token == "auto":
        return PlanError("auto has not landed: no plan is searched for yet", allowed="a plan that is named", remedy="zero2+bf16")
    if token in _NAMES:
        return PlanError(f"{token} has no number", allowed=f"{token} followed by a number", remedy=_NAMES[token])
    if re.fullmatch(r"tp[0-9]+:2\.5d", token):
        return PlanError(f"{token} has no depth", allowed="tp8:2.5d2, with the depth at the end", remedy=f"{token}2")
    if match := re.fullmatch(r"tp([0-9]+):.*", token):
        return PlanError(f"{token} is no kind of tensor parallelism", allowed="tp4, tp4:2d, tp8:2.5d2, tp8:3d", remedy=f"tp{match[1]}")
    known = [*_WORDS, *_NAMES, "recompute=0.5"]
    close = nearest(token, _WORDS)
    if close is None:
        # The number of a misspelt name is the reader's own, so it is kept in what is offered.
        name, number = re.fullmatch(r"(.*?)([0-9]*)", token, re.DOTALL).groups()  # type: ignore[union-attr]
        close = nearest(name, known)
        if close in _NAMES:
            offered = f"{close}{number}" if number else _NAMES[close]
            close = offered if close != "zero" or number in ("0", "1", "2", "3") else "zero3"
    words = " ".join([*_WORDS, "recompute=0.5", "tp4:2d", "zero3:4", *_NAMES.values()])
    return PlanError(f"{token!r} is no term of a plan", allowed=words, remedy=close or "zero1+bf16")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most likely stands for, in any case of letters: a misspelling, or else the start of it."""
    word, known = word.lower(), list(known)
    close = difflib.get_close_matches(word, known, n=1) or [name for name in known if len(word) > 1 and name.startswith(word)]
    return close[0] if close else None


def terms(plan: PlanFields) -> list[tuple[str, str]]:
    """The terms of a plan in their one order, as (strategy, text); terms at their default are left out."""
    state = [(name, name) for name in ("gemini", "offload") if getattr(plan, name)]
    data = [("dp", f"dp{plan.dp}")] if plan.dp is not None else []
    passes = [(name, f"{name}{getattr(plan, name)}") for name in ("ep", "acc") if getattr(plan, name) > 1]
    precision = [(plan.precision, plan.precision)] if plan.precision != "fp32" else []
    ordered = [_zero_terms(plan), state, data, _tensor_terms(plan), _context_terms(plan), _pipeline_terms(plan), passes, precision]
    return [term for group in ordered for term in group] + _recompute_terms(plan)


def _zero_terms(plan: PlanFields) -> list[tuple[str, str]]:
    found = [("fsdp", "fsdp")] if plan.fsdp else []
    if plan.zero_group:
        found.append(("zero:group", f"zero{plan.zero}:{plan.zero_group}"))
    elif plan.zero and not (plan.gemini and plan.zero == 3):
        found.append(("zero", f"zero{plan.zero}"))
    return found


def _tensor_terms(plan: PlanFields) -> list[tuple[str, str]]:
    found = []
    if plan.tp_kind != "1d":
        depth = plan.tp_depth if plan.tp_kind == "2.5d" else ""
        found.append((f"tp:{plan.tp_kind}", f"tp{plan.tp}:{plan.tp_kind}{depth}"))
    elif plan.tp > 1:
        found.append(("tp", f"tp{plan.tp}"))
    return found + ([("sp", "sp")] if plan.sp else [])


def _pipeline_terms(plan: PlanFields) -> list[tuple[str, str]]:
    found = [("pp", f"pp{plan.pp}")] if plan.pp > 1 else []
    if plan.interleaved > 1:
        found.append(("interleaved", f"interleaved{plan.interleaved}"))
    elif plan.schedule != "1f1b":
        found.append((plan.schedule, plan.schedule))
    return found + ([("micro", f"micro{plan.micro}")] if plan.micro is not None else [])


def _recompute_terms(plan: PlanFields) -> list[tuple[str, str]]:
    if plan.recompute is None:
        return []
    words: dict[object, str] = {"full": "recompute", "selective": "selective"}
    stages = plan.recompute if isinstance(plan.recompute, tuple) else (plan.recompute,)
    values = [stage if isinstance(stage, str) else repr(float(stage)).removesuffix(".0") for stage in stages]
    return [("recompute", words.get(plan.recompute) or f"recompute={','.join(values)}")]


def _context_terms(plan: PlanFields) -> list[tuple[str, str]]:
    if plan.ulysses is None or plan.ring is None:
        return [("cp", f"cp{plan.cp}")] if plan.cp > 1 else []
    named = [(name, f"{name}{size}") for name, size in (("ulysses", plan.ulysses), ("ring", plan.ring)) if size > 1]
    if plan.ulysses * plan.ring == plan.cp:
        return named
    # A contradiction, which `check` reports, is printed as it was said.
    return [("cp", f"cp{plan.cp}"), *(named or [("ulysses", "ulysses1")])]


def print_plan(plan: PlanFields) -> str:
    """The one text of a plan; what only the file form can say is not in it."""
    return "+".join(text for _, text in terms(plan)) or "zero0"
