"""One model in training: its passes, its statistics over all ranks, and its optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode

from phalanx.anatomy import takes_cache
from phalanx.booster.model_calls import evaluating
from phalanx.booster.objective import Objective
from phalanx.booster.optimizer import BoostedOptimizer, BoostedScheduler, move_to_shards, step_scaled, use_fused_kernels
from phalanx.booster.result import Result
from phalanx.booster.rhythm import Rhythm
from phalanx.booster.sequence_proof import prove
from phalanx.booster.sequences import SplitSequences
from phalanx.booster.start import Names
from phalanx.cluster import comm, stopping
from phalanx.cluster.mesh import Axis
from phalanx.data import num_rows, spare_row, take_rows
from phalanx.errors import ConfigError, ShapeError
from phalanx.layout import Range, split_range
from phalanx.memory import StateEngine
from phalanx.memory.record import Pass, require_data
from phalanx.memory.reduction import backward_outside
from phalanx.optim.elementwise import refuse_closure, require_elementwise, require_separable
from phalanx.optim.norm import clip_factor, local_power, norm_from_power
from phalanx.optim.scale import LossScale
from phalanx.parallel.expert.mixture import Mixture
from phalanx.parallel.expert.share import PassShare
from phalanx.parallel.pipeline.run import MicroBatch, Runner


@dataclass
class Agreed:
    """What all ranks know of a step before its update: sums over ranks."""

    loss_sum: float
    count: float
    power: float
    stop_asked: bool


class Training:
    """Runs global batches through a boosted model, pass by pass, and steps its optimizer.

    `num_passes` is the number of accumulation passes; `world` holds all ranks, of which only those with `counts_loss` add their
    loss and count to the sums. `cut` cuts the rows of a data index once more, as a grid does. `runs` tells which modules run here, and
    `whole` brings those that do not.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: StateEngine,
        objective: Objective,
        *,
        runner: Runner | None = None,
        world: Axis,
        counts_loss: bool = True,
        cut: Axis | None = None,
        num_passes: int,
        clip_norm: float | None,
        norm_type: float,
        scale: LossScale,
        split: Any = None,
        names: Names,
        runs: Callable[[nn.Module], bool] = lambda module: True,
        whole: Callable[[], AbstractContextManager[None]] = nullcontext,
        share: PassShare | None = None,
        mixture: Mixture | None = None,
        sequences: SplitSequences | None = None,
    ):
        self.model, self.engine, self.objective, self.runner = model, engine, objective, runner
        self.world, self.counts_loss, self.num_passes, self.split = world, counts_loss, num_passes, split
        self.cut = cut
        self.clip_norm, self.norm_type, self.scale = clip_norm, norm_type, scale
        self.model_names, self.runs, self.whole = names, runs, whole
        self.share, self.mixture, self.sequences = share or PassShare(), mixture, sequences
        self.optimizer: BoostedOptimizer | None = None
        self.scheduler: BoostedScheduler | None = None
        self.group_names: list[list[str]] = []
        self.synchronise = True
        self.num_steps = self.skipped_total = 0
        self.spare: Any = None
        self.scale_is_fitted = scale.growth == 1.0
        self.rhythm = Rhythm(world)
        self.names = _all_names(engine, world)
        self.engine.clear_gradients()
        self._forget()

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts this rank's shards into the optimizer's groups.

        Raises: ConfigError for an optimizer that cannot work on shards exactly.
        """
        refuse_closure(optimizer)
        if self.engine.policy.optimizer:
            require_elementwise(optimizer)
        if self.engine.tiers is not None:
            require_separable(optimizer)
            self.engine.tiers.optimizer_state = optimizer.state
        self.group_names = move_to_shards(optimizer, self.engine, self.model_names.of)
        use_fused_kernels(optimizer)
        self.optimizer = BoostedOptimizer(optimizer, lambda: self.step(advance=False), self.clear)

    def _forget(self) -> None:
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        self.count = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        self.agreed: Agreed | None = None
        self.num_backwards = 0
        self.rhythm.restart()

    # -- passes --------------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Any) -> None:
        """All passes of one global batch's local rows; their gradients add up until the optimizer's step."""
        if self.runner is not None:
            self._through_stages(batch, self.runner)
            return
        self.plan_moves(batch)
        for number, (rows, weight) in enumerate(self._passes(batch, self.num_passes)):
            self.engine.begin_pass(number)
            last = number == self.num_passes - 1
            with self.share.weighing(weight), self._placed(rows) as part:
                with self.engine.watched():
                    loss_sum, count = self.objective(self.model, part)
                self.backward(loss_sum * weight, count * weight, synchronise=last and self.synchronise)

    def _through_stages(self, batch: Any, runner: Runner) -> None:
        """All passes through a pipeline: each is cut into micro-batches, which all its ranks see."""
        self._require_open()
        self.rhythm.visit("a pipeline")
        micro_batches = self._micro_batches(batch, self.num_passes)
        self._teach_sequences(runner, micro_batches)
        if not self.scale_is_fitted:
            with self.share.repeating():
                counts = [runner.evaluate(micro_batches[start : start + runner.num_micro])[1] for start in self._starts(runner)]
            self._fit_scale(torch.stack(counts).sum())
        starts = self._starts(runner)
        for start in starts:
            some = micro_batches[start : start + runner.num_micro]
            loss_sum, count = runner.step(some, self.scale.value, opens=start == starts[0], closes=start == starts[-1])
            self.loss_sum += loss_sum
            self.count += count
            self.num_backwards += 1

    def _teach_sequences(self, runner: Runner, micro_batches: list[MicroBatch]) -> None:
        """Where sequences are cut, stages run on parts of their rows, once it is proven that they may."""
        if self.sequences is None or self.sequences.is_proven(micro_batches[0].rows):
            return
        prove(self.sequences, micro_batches[0].rows, runner.try_out, self.world)
        runner.hooks = replace(runner.hooks, placed=self.sequences.passage)

    def _starts(self, runner: Runner) -> range:
        return range(0, self.num_passes * runner.num_micro, runner.num_micro)

    def _micro_batches(self, batch: Any, num_passes: int) -> list[MicroBatch]:
        assert self.runner is not None
        passes = self._passes(batch, num_passes * self.runner.num_micro)
        return [MicroBatch(to_device(rows, self.engine.device), weight) for rows, weight in passes]

    def _require_open(self) -> None:
        if self.agreed is not None:
            raise ConfigError(
                "a backward came after this step's gradients were read",
                allowed="optimizer.step() or optimizer.zero_grad() after booster.gradients()",
                remedy="call booster.gradients() after the last backward",
            )

    def backward(self, loss_sum: torch.Tensor, count: torch.Tensor, synchronise: bool) -> None:
        """Differentiates a sum of losses and adds it and its count to the step's."""
        self._require_open()
        if synchronise or self.engine.policy.gradient:
            self.rhythm.visit("a backward")
        if not self.scale_is_fitted:
            self._fit_scale(count)
        if self.engine.tiers is not None:
            require_data(loss_sum)
        self.share.slope = self.share.weight * self.scale.value
        with self.engine.backward(synchronise), self.share.repeating():
            (loss_sum * self.scale.value).backward() if self.scale.value != 1.0 else loss_sum.backward()
        self.loss_sum += loss_sum.detach() + self.share.take_added()
        self.count += count
        self.num_backwards += 1

    def _fit_scale(self, count: torch.Tensor) -> None:
        """Before the very first backward: scales are chosen for a mean, and what is differentiated is a sum."""
        total = count * self.counts_loss
        comm.all_reduce(total, self.world).wait()
        self.scale.fit(float(total))
        self.scale_is_fitted = True

    def _passes(self, batch: Any, num_passes: int) -> Iterator[tuple[Any, float]]:
        """The local rows cut into passes, each with weight 1; a pass without rows runs a spare row at weight 0."""
        spare = spare_row(batch)
        total = self.num_rows(batch)
        if total:
            self.spare = spare = self.rows(batch, 0, 1, total)
        for number in range(num_passes):
            start, stop = self._own(*split_range(total, num_passes, number))
            if start < stop:
                yield self.rows(batch, start, stop, total), 1.0
            else:
                yield self._spare_or_raise(spare), 0.0

    def _own(self, start: int, stop: int) -> Range:
        """Of some rows those of this rank, where a grid cuts the rows of a data index once more."""
        if self.cut is None or self.cut.size == 1:
            return start, stop
        first, last = split_range(stop - start, self.cut.size, self.cut.index)
        return start + first, start + last

    def plan_moves(self, batch: Any) -> None:
        """Plans the moves of a step with this batch, where the state lives in tiers; no step is run.

        Raises: CapacityError where the device's budget is too small for it, with the smallest that would do.
        """
        if self.engine.tiers is None:
            return
        rows = self._largest_pass(batch)
        self._prove_sequences(rows)
        self.engine.prepare(Pass(rows, lambda rows: self.objective(self.model, rows)[0], self._uncounted), self.num_passes)

    @contextmanager
    def _uncounted(self, rows: Any) -> Iterator[Any]:
        """What of these rows is this rank's; nothing that is noted inside counts."""
        with self.share.weighing(0.0), self._placed(rows) as part:
            yield part

    def _largest_pass(self, batch: Any) -> Any:
        total = self.num_rows(batch)
        if not total:
            return self._spare_or_raise(spare_row(batch))
        return self.rows(batch, 0, -(-total // self.num_passes), total)

    def _spare_or_raise(self, spare: Any) -> Any:
        spare = self.spare if spare is None else spare
        if spare is None:
            raise ShapeError(
                "this rank's first batch has no rows, and no row of the global batch is at hand to take part with",
                allowed="a loader given to boost, or at least one row per rank in the first batch",
                remedy="booster.boost(..., dataloader=loader)",
            )
        return spare

    def num_rows(self, batch: Any) -> int:
        return num_rows(batch)

    def rows(self, batch: Any, start: int, stop: int, total: int) -> Any:
        return self.split(batch, start, stop) if self.split else take_rows(batch, start, stop, total)

    @contextmanager
    def _placed(self, rows: Any) -> Iterator[Any]:
        """What of these rows is this rank's, on the device; forward and backward run inside."""
        if self.sequences is None:
            yield to_device(rows, self.engine.device)
            return
        self._prove_sequences(rows)
        with self.sequences.running(rows) as part:
            yield part

    def _prove_sequences(self, rows: Any) -> None:
        """Where sequences are cut, tries out whether they may be. Collective."""
        if self.sequences is not None and not self.sequences.is_proven(rows):
            prove(self.sequences, rows, lambda batch: self.objective.without_proof(self.model, batch), self.world)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The whole model's parameters on every rank while inside. Collective."""
        with self.engine.gathered(), self.whole():
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave gradients local where the plan keeps whole gradients; the next one outside reduces all."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Result:
        """The loss of a global batch without gradients, in evaluation mode."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        with evaluating(self.model), _without_cache(self.model):
            if self.runner is not None:
                micro_batches = self._micro_batches(batch, 1)
                self._teach_sequences(self.runner, micro_batches)
                totals += torch.stack(self.runner.evaluate(micro_batches))
            else:
                for rows, weight in self._passes(batch, 1):
                    with self.share.weighing(weight), self._placed(rows) as part:
                        loss_sum, count = self.objective(self.model, part)
                    totals += torch.stack([loss_sum.double(), count]) * weight
        self.rhythm.visit("the loss of an evaluation")
        return self.total(totals)

    def total(self, loss_and_count: torch.Tensor) -> Result:
        """Loss and count over all ranks, from this rank's sums. Collective."""
        totals = loss_and_count * self.counts_loss
        comm.all_reduce(totals, self.world).wait()
        loss, count = totals.tolist()
        return Result(loss=loss / count if count else math.nan, tokens=round(count))

    # -- the step ------------------------------------------------------------------------------------------------------

    def agree(self) -> Agreed:
        """Sums gradients, losses, counts and the norm over all ranks; the one host read of a step."""
        if self.agreed is not None:
            return self.agreed
        self.rhythm.visit("the end of the step")
        engine = self.engine
        engine.finish_gradients()
        mine = engine.used()
        if not self.num_backwards and mine:
            raise backward_outside()
        if self.world.size > 1:  # a rank that did not use a parameter still holds a part of its summed gradient
            engine.set_used(set(self.names))
        power = local_power(engine.gradient_parts(), self.norm_type, engine.device)
        if math.isinf(self.norm_type):
            comm.all_reduce(power, self.world, op="max").wait()
            power = power / self.world.size
        own = torch.stack([self.loss_sum, self.count]) * self.counts_loss
        told = [self.num_backwards, stopping.asked(), *(name in mine for name in self.names)]
        used = torch.tensor(told, dtype=torch.float64, device=engine.device)
        vector = torch.cat([own, power.reshape(1), used])
        comm.all_reduce(vector, self.world).wait()
        loss_sum, count, total, num_backwards, num_asked, *flags = _read(vector)
        engine.set_used({name for name, flag in zip(self.names, flags) if flag > 0})
        if not num_backwards:
            raise ConfigError(
                "no rank ran a backward since the last step",
                allowed="optimizer.step() and booster.gradients() after a backward",
                remedy="booster.backward(loss, optimizer), or booster.step(batch)",
            )
        if math.isnan(loss_sum):
            engine.look_again()
        self.agreed = Agreed(loss_sum, count, total, stop_asked=num_asked > 0 and detect_fake_mode(vector) is None)
        return self.agreed

    def step(self, advance: bool) -> Result:
        """Normalises, clips and applies the gradients of every backward since the last step, or skips them on all ranks.

        `advance`: move the scheduler as well.
        """
        if self.optimizer is None:
            raise ConfigError("this model was boosted without an optimizer", remedy="booster.boost(model, optimizer)")
        agreed, scale = self.agree(), self.scale.value
        divisor = agreed.count * scale
        norm = norm_from_power(agreed.power, self.norm_type) / divisor if agreed.count else math.nan
        skipped = not math.isfinite(norm)
        factor = clip_factor(norm, self.clip_norm)
        lr = float(self.optimizer.param_groups[0]["lr"]) if self.optimizer.param_groups else None
        if not skipped:
            self._update(factor / divisor)
            self.num_steps += 1
        if agreed.count:
            self.scale.update(finite=not skipped)
        self.skipped_total += skipped
        result = Result(
            loss=agreed.loss_sum / agreed.count if agreed.count else math.nan,
            tokens=round(agreed.count),
            grad_norm=norm,
            clip_factor=factor,
            skipped=skipped,
            skipped_total=self.skipped_total,
            lr=lr,
            loss_scale=scale,
            stop_asked=agreed.stop_asked,
        )
        self.clear()
        if self.scheduler is not None:
            self.scheduler.after_step(skipped, advance)
        return result

    def _update(self, factor: float) -> None:
        assert self.optimizer is not None
        inner = self.optimizer.inner
        self.engine.update(inner, lambda: step_scaled(inner, factor))
        if self.mixture is not None:
            self.mixture.after_step()

    def clear(self) -> None:
        """Forgets gradients, losses and counts since the last step."""
        if self.mixture is not None and self.num_backwards:  # not for a forward that is still to be differentiated
            self.mixture.end_step()
        self.engine.clear_gradients()
        self._forget()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Every full gradient, normalised and before clipping, by the model's own names."""
        agreed = self.agree()
        divisor = agreed.count * self.scale.value
        return {name: gradient.detach().clone() / divisor for name, gradient in self.engine.full_gradients()}


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """While inside the model keeps no cache of keys and values: it would hide the borders of documents from `transformers`."""
    if not takes_cache(model):
        yield
        return
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: (args, {"use_cache": False, **kwargs}), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _all_names(engine: StateEngine, world: Axis) -> list[str]:
    """The parameters of all ranks, in an order that all ranks share."""
    listed = comm.gather_objects([slot.name for _, slot in engine.slots], world)
    return list(dict.fromkeys(name for names in listed for name in names))


def _read(vector: torch.Tensor) -> list[float]:
    """The numbers on the host. In a rehearsal there are none: the step is then taken as one with a count, a norm and all flags of 1."""
    if detect_fake_mode(vector) is not None:
        return [1.0] * len(vector)
    return vector.tolist()


def to_device(value: Any, device: torch.device) -> Any:
    """The batch with all tensors on the device; what is there already is not copied."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if device.type == "cpu":
        return value
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(to_device(item, device) for item in value)
    return value.to(device) if hasattr(value, "to") else value
