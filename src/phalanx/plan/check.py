"""Every conflict of a plan: with itself, with the world it is to run on, and with the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from phalanx.errors import PlanError
from phalanx.plan.fields import AXES, PlanFields


def conflicts(plan: PlanFields, anatomy: object | None = None, world: int | None = None) -> list[PlanError]:
    """Everything that keeps this plan from running, all at once.

    Of `anatomy` the counts `num_layers`, `num_experts` are read where it has them.
    """
    return [*_world(plan, world), *_beside_the_world(plan, world), *_model(plan, anatomy)]


def _beside_the_world(plan: PlanFields, world: int | None) -> list[PlanError]:
    """What contradicts itself in a plan whose axes fit the world, or whose world is not known."""
    found = [*_tensor(plan), *_loss(plan), *_context(plan), *_pipeline(plan), *_recompute(plan)]
    return [*found, *_zero(plan, world), *_experts(plan, world), *_fsdp(plan), *_gemini(plan)]


def _world(plan: PlanFields, world: int | None) -> Iterator[PlanError]:
    if world is None or plan.data_index_count(world) is not None:
        return
    if world < 1:
        yield PlanError(f"a world of {world} ranks", allowed="1 or more", remedy=f"world {(plan.dp or 1) * plan.model_size}")
        return
    sizes = {name: getattr(plan, name) for name in AXES}
    named = {name: size for name, size in sizes.items() if size is not None and (size > 1 or name == "dp")}
    product = math.prod(named.values())
    terms = "+".join(f"{name}{size}" for name, size in named.items())
    if plan.dp is None:
        found, allowed = f"world {world} does not fit {terms}", f"a multiple of {product} ranks"
    else:
        found, allowed = f"world {world} is not {terms}", f"{product} ranks"
    yield PlanError(found, allowed=allowed, remedy=_fitting_axis(plan, world))


def _fitting_axis(plan: PlanFields, world: int) -> str:
    """The smallest change of one axis that makes the plan fit the world and brings no other conflict."""
    if plan.dp is not None and world % plan.model_size == 0:
        return f"dp{world // plan.model_size} in place of dp{plan.dp}, or leave dp out"
    others = {str(conflict) for conflict in _beside_the_world(plan, None)}
    changes: list[tuple[int, str]] = []
    for name in ("pp", "cp", "tp"):
        size: int = getattr(plan, name)
        rest, left = divmod(world, (plan.dp or 1) * plan.model_size // size)
        if size == 1 or left:
            continue
        for value in _divisors(rest) if plan.dp is None else [rest]:
            changed = dataclasses.replace(plan, **{name: value})  # type: ignore[arg-type]
            fits = changed.data_index_count(world) is not None
            if fits and others.issuperset(str(conflict) for conflict in _beside_the_world(changed, world)):
                kind = f":{plan.tp_kind}" if name == "tp" and plan.tp_kind in ("2d", "3d") else ""
                changes.append((abs(value - size), f"{name}{value}{kind} in place of {name}{size}"))
    return min(changes)[1] if changes else f"dp{world} with no other axis"


def _tensor(plan: PlanFields) -> Iterator[PlanError]:
    if plan.sp and plan.tp == 1:
        yield PlanError("sp without tp", allowed="sp splits the sequence over the ranks of tp", remedy="tp2+sp, or leave sp out")
    if plan.sp and plan.tp_kind != "1d":
        yield PlanError(
            f"sp with tp:{plan.tp_kind}, which splits activations itself", allowed="sp with 1D tensor parallelism", remedy=f"tp{plan.tp}+sp"
        )
    if plan.tp_keep is False and not plan.sp:  # on grids it is None then: they gather again of themselves
        yield PlanError("tp_keep = false without sp", allowed="sp, or a grid: nothing else is gathered", remedy="leave tp_keep out")
    if plan.tp_outputs_move and plan.tp_kind not in ("2d", "2.5d"):
        yield PlanError(f"tp_outputs_move with tp:{plan.tp_kind}", allowed="tp on a grid (2d, 2.5d)", remedy="leave tp_outputs_move out")
    power = 3 if plan.tp_kind == "3d" else 2
    if plan.tp_kind == "1d" or _is_power(plan.tp, plan.tp_depth, power):
        return
    shape = {"2d": "a square", "2.5d": f"{plan.tp_depth} times a square", "3d": "a cube"}[plan.tp_kind]
    side = max(2, round((plan.tp / plan.tp_depth) ** (1 / power)))
    depth = str(plan.tp_depth) if plan.tp_kind == "2.5d" else ""
    fitting = f"tp{plan.tp_depth * side**power}:{plan.tp_kind}{depth}"
    yield PlanError(f"tp{plan.tp}:{plan.tp_kind}{depth} is no grid", allowed=f"a size that is {shape}", remedy=fitting)


def _loss(plan: PlanFields) -> Iterator[PlanError]:
    for name in ("fsdp", "gemini"):
        if plan.chunked_loss and getattr(plan, name):
            yield PlanError(f"chunked_loss with {name}", allowed="chunked_loss with zero0 to zero3", remedy=f"zero3 in place of {name}")


def _context(plan: PlanFields) -> Iterator[PlanError]:
    if plan.ulysses is None or plan.ring is None or plan.ulysses * plan.ring == plan.cp:
        return
    named = "+".join(f"{name}{size}" for name, size in (("ulysses", plan.ulysses), ("ring", plan.ring)) if size > 1) or "ulysses1"
    remedy = f"{named}, or cp{plan.cp} alone"
    yield PlanError(
        f"cp{plan.cp} with {named}", allowed="cp = ulysses · ring", remedy=remedy if named != "ulysses1" else f"cp{plan.cp} alone"
    )


def _pipeline(plan: PlanFields) -> Iterator[PlanError]:
    if plan.pp_keep and (plan.pp == 1 or plan.zero < 2):
        found = "pp_keep without pp" if plan.pp == 1 else f"pp_keep with zero{plan.zero}, which reduces once per step by itself"
        yield PlanError(found, allowed="pp with zero2 or zero3", remedy="leave pp_keep out")
    if plan.pp > 1:
        return
    if plan.micro is not None:
        remedy = f"acc{plan.micro}, which cuts a batch without a pipeline" if plan.micro > 1 else "leave micro out"
        yield PlanError(f"micro{plan.micro} without pp", allowed="micro-batches belong to a pipeline", remedy=remedy)
    if plan.interleaved > 1:
        yield PlanError(
            f"interleaved{plan.interleaved} without pp",
            allowed="a schedule belongs to a pipeline",
            remedy=f"pp2+interleaved{plan.interleaved}",
        )
    if plan.schedule != "1f1b":
        yield PlanError(f"{plan.schedule} without pp", allowed="a schedule belongs to a pipeline", remedy=f"pp2+{plan.schedule}")


def _recompute(plan: PlanFields) -> Iterator[PlanError]:
    if not isinstance(plan.recompute, tuple):
        return
    count, stages = len(plan.recompute), plan.pp * plan.num_chunks
    found = f"recompute for {count} stages"
    if plan.pp == 1:
        yield PlanError(f"{found} without pp", allowed="one fraction or kind for all layers", remedy="recompute=0.5")
    elif count not in (plan.pp, stages):
        allowed = f"{plan.pp}, one for each rank" + (f", or {stages}, one for each stage" if stages > plan.pp else "")
        remedy = ",".join(["recompute=full", *["0"] * (plan.pp - 1)])
        yield PlanError(f"{found} with pp{plan.pp}", allowed=allowed, remedy=remedy)


def _zero(plan: PlanFields, world: int | None) -> Iterator[PlanError]:
    group = plan.zero_group
    if group is None:
        return
    if plan.zero != 3:
        yield PlanError(f"zero{plan.zero}:{group}", allowed="groups belong to zero3", remedy=f"zero3:{group}")
    dp = plan.data_index_count(world)
    if dp is None:
        return
    shards = dp * plan.cp * plan.tp_depth
    if shards % group:
        best = _nearest_divisor(shards, group)
        remedy = f"zero3:{best}" if best > 1 else "zero0"
        found = f"groups of {group} do not divide the {shards} ranks that share the data and shard the state"
        yield PlanError(found, allowed=f"divisors of {shards}", remedy=remedy)


def _experts(plan: PlanFields, world: int | None) -> Iterator[PlanError]:
    dp = plan.data_index_count(world)
    if dp is None or (dp * plan.cp) % plan.ep == 0:
        return
    best = _nearest_divisor(dp * plan.cp, plan.ep)
    remedy = f"ep{best}" if best > 1 else "leave ep out" + (f", or dp{plan.ep}" if world is None else "")
    yield PlanError(f"ep{plan.ep} does not divide dp · cp = {dp * plan.cp}", allowed=f"divisors of {dp * plan.cp}", remedy=remedy)


def _fsdp(plan: PlanFields) -> Iterator[PlanError]:
    if not plan.fsdp:
        return
    for name in ("pp", "cp", "tp", "ep"):
        if (size := getattr(plan, name)) > 1:
            yield PlanError(
                f"fsdp with {name}{size}", allowed="fsdp is PyTorch's own engine, over data ranks only", remedy=f"zero3+{name}{size}"
            )
    if plan.zero or plan.zero_group:
        stage = f"zero{plan.zero}"
        yield PlanError(f"fsdp with {stage}, two engines for one state", allowed="one of them", remedy=f"{stage} alone, or fsdp alone")
    if plan.offload:
        yield PlanError("fsdp with offload", allowed="offload belongs to zero", remedy="zero3+offload")
    if plan.precision == "fp8":
        yield PlanError("fsdp with fp8", allowed="fp32, bf16 or fp16", remedy="fsdp+bf16")


def _gemini(plan: PlanFields) -> Iterator[PlanError]:
    if not plan.gemini:
        return
    if plan.zero != 3:
        yield PlanError(f"gemini with zero{plan.zero}", allowed="gemini means zero3 with budgets", remedy="gemini alone")
    if plan.offload:
        yield PlanError("gemini with offload", allowed="gemini decides itself what leaves the device", remedy="gemini alone")


def _model(plan: PlanFields, anatomy: object | None) -> Iterator[PlanError]:
    layers = getattr(anatomy, "num_layers", None)
    chunks = plan.pp * plan.num_chunks
    if layers is not None and plan.pp > 1 and chunks > layers:
        remedy = f"pp{layers // plan.num_chunks}" if layers // plan.num_chunks > 1 else "leave pp out"
        yield PlanError(f"a pipeline of {chunks} chunks for {layers} layers", allowed="at least one layer in each chunk", remedy=remedy)
    if layers == 0 and plan.recompute is not None:
        yield PlanError(
            "recompute for a model without a stack of layers", allowed="models with repeated layers", remedy="leave recompute out"
        )
    experts = getattr(anatomy, "num_experts", None)
    if experts is not None and plan.ep > max(experts, 1):
        found = f"ep{plan.ep} for {experts} experts" if experts else f"ep{plan.ep} for a model without experts"
        yield PlanError(found, allowed="at most one rank for each expert", remedy=f"ep{experts}" if experts > 1 else "leave ep out")


def _divisors(value: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(value) + 1) if value % divisor == 0]
    return sorted({*small, *(value // divisor for divisor in small)})


def _nearest_divisor(value: int, wanted: int) -> int:
    """The divisor of `value` that is nearest to `wanted`, the smaller of two."""
    return min(_divisors(value), key=lambda divisor: abs(divisor - wanted))


def _is_power(size: int, depth: int, power: int) -> bool:
    """Whether `size` is `depth` times a whole number to `power`."""
    quotient, rest = divmod(size, depth)
    return rest == 0 and quotient == round(quotient ** (1 / power)) ** power
