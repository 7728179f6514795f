"""What a micro-batch takes in each stage of a pipeline, found on a model of the right shapes before it is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from phalanx.anatomy import layer_stacks
from phalanx.booster.stages import recompute_by_stage, recomputes, table_and_cut
from phalanx.memory.stream import tensors_in
from phalanx.parallel.pipeline.balance import LayerCosts
from phalanx.parallel.pipeline.cut import Cut
from phalanx.parallel.pipeline.footprint import StageBytes, peak_bytes
from phalanx.parallel.pipeline.halves import Halves
from phalanx.plan import Plan
from phalanx.planner.memory import predict, scale_activations
from phalanx.train.memory import StepMemory, TensorCount, chunk_sizes
from phalanx.train.recipe import BatchSettings


def predicted_in_stages(
    model: torch.nn.Module, batch: BatchSettings, plan: Plan, world: int, pp_index: int, costs: LayerCosts | None = None
) -> StepMemory:
    """What a plan with a pipeline says that the ranks at one place of it will keep and reach, before the run."""
    data_size = plan.sizes(world)["dp"]
    table, cut = table_and_cut(model, tuple(layer_stacks(model)), plan, costs=costs)
    mine = [table.stage(pp_index, chunk) for chunk in range(table.num_chunks)]
    sizes = chunk_sizes(model, lambda parameter: bool(cut.stages_of(parameter).intersection(mine)))
    found = predict(sum(sizes), sizes, plan, data_size)
    gradients = found.pop("gradient")  # they come with the first backward, not with the step
    rows = scale_activations(1, 1, batch.rows, plan, data_size)
    recompute_by_stage(plan, table, cut)
    halves = plan.pp_keep or plan.zero < 3 or data_size == 1
    stays = data_size * plan.cp * plan.tp == 1 and plan.precision == "fp32"
    tokens = torch.zeros(2, batch.tokens, dtype=torch.int64)
    parts = Parts(model, {"input_ids": tokens, "labels": tokens}, cut, rows, gradients / sum(sizes), stays)
    stages = [parts.stage(stage, halves and not recomputes(cut, stage)) for stage in range(cut.num_stages)]
    return StepMemory(found["parameter"] + found["optimizer"], found["total"] - gradients + peak_bytes(table, stages)[pp_index])


@dataclass
class Segment:
    """A part of a pass: what it keeps for the backward, what its first half leaves for the second, and the most that each way rises by.

    The backward rises by `early` before the first gradient of a weight has come, and by `late` from then on, were each let go as it comes;
    by `grown`, were each kept.
    """

    kept: int = 0
    later: int = 0
    forward: int = 0
    early: int = 0
    late: int = 0
    grown: int = 0

    @property
    def backward(self) -> int:
        return max(self.early, self.late)

    def first(self, made: int, stays: bool) -> int:
        """The rise of the first backward: gradients stay as they come, or the first one brings the memory of all that are `made`."""
        return self.grown if stays else max(self.early, self.late + made)


class Parts:
    """What a micro-batch of `rows` rows takes before, in and after each layer, and the gradients that its weights leave.

    What grows with the rows is told from what does not, as gradients in the making, by passes of one row and of two. Gradients of layers
    stay as they come where one rank `stays` alone with them, else they are gathered in one piece of memory for each layer.
    Cost: four passes over the hollow model.
    """

    def __init__(
        self, model: torch.nn.Module, batch: dict[str, torch.Tensor], cut: Cut, rows: int, gradient_bytes: float = 4.0, stays: bool = True
    ):
        self.cut, self.gradient_bytes, self.stays = cut, gradient_bytes, stays
        self.segments, self.hidden = self._measure(model, batch, rows, halves=False)
        self.halved, _ = self._measure(model, batch, rows, halves=True)
        inside = {id(parameter) for _, block in cut.blocks for parameter in block.parameters()}
        outside = [(cut.stages_of(parameter), parameter.numel()) for parameter in model.parameters() if id(parameter) not in inside]
        ends = [sum(size for stages, size in outside if stage in stages) for stage in (0, cut.num_stages - 1)]
        self.weights = [ends[0], *(sum(p.numel() for p in block.parameters()) for _, block in cut.blocks), ends[1]]

    def _measure(self, model: torch.nn.Module, batch: dict[str, torch.Tensor], rows: int, halves: bool) -> tuple[list[Segment], int]:
        one, two = (_Passage(model, self.cut, halves).run({name: tensor[:count] for name, tensor in batch.items()}) for count in (1, 2))
        at_rows = lambda first, second: first + (rows - 1) * (second - first)  # noqa: E731
        segments = [Segment(*map(at_rows, vars(a).values(), vars(b).values())) for a, b in zip(one[0], two[0], strict=True)]
        return segments, at_rows(one[1], two[1])

    def stage(self, number: int, halves: bool) -> StageBytes:
        """The parts of one stage together."""
        first, last = self.cut.range(number)
        is_first, is_last = number == 0, number == self.cut.num_stages - 1
        mine = slice(first + 1 - is_first, last + 2 + is_last)
        received, handed = 0 if is_first else self.hidden, 0 if is_last else self.hidden
        made = [round(size * self.gradient_bytes) for size in self.weights[mine]]
        # Outside of the layers one large weight is alone in its chunk, and its gradient itself becomes the memory.
        stay = [self.stays or place in (0, len(self.segments) - 1) for place in range(len(self.segments))[mine]]
        forth, back = self.segments[mine], list(zip(self.segments[mine], made, stay))[::-1]
        kept = sum(part.kept for part in forth)
        whole = _highest((part.backward, -part.kept) for part, *_ in back)
        found = StageBytes(
            received=received,
            handed=handed,
            kept=kept - handed,
            forward=_highest((part.forward, part.kept) for part in forth),
            backward=whole,
            input=whole,  # a backward that is not halved runs where its first half would
            first=_highest((part.first(new, stays), new - part.kept) for part, new, stays in back),
            gradients=sum(made),
        )
        if not halves:
            return found
        if is_first:  # nobody waits for it: all is left to the second half
            return replace(found, kept_for_weights=found.kept + handed, input=0, weight=found.backward, first_weight=found.first)
        back = self.halved[mine][::-1]
        return replace(
            found,
            kept_for_weights=sum(part.later for part in back) - handed + received,
            input=_highest((part.backward, part.later - part.kept) for part in back),
            first_weight=_highest((new, new - part.later) for part, new in zip(back, made[::-1])),
        )


def _highest(changes: Iterable[tuple[int, int]]) -> int:
    """The most that (rise, change) one after another come to."""
    level = highest = 0
    for rise, change in changes:
        highest, level = max(highest, level + rise), level + change
    return highest


class _Passage:
    """One forward and backward of a model, with the count of tensors read between its layers."""

    def __init__(self, model: torch.nn.Module, cut: Cut, halves: bool):
        self.model, self.blocks, self.halves = model, [block for _, block in cut.blocks], halves
        self.entry: list[torch.Tensor] = []
        self.segments = [Segment() for _ in range(len(self.blocks) + 2)]
        self.hidden = 0

    def run(self, batch: dict[str, torch.Tensor]) -> tuple[list[Segment], int]:
        """The segments, and the bytes of what goes from layer to layer."""
        with self._watched(), TensorCount() as self.count:
            self._begin(0)
            loss = self.model(**batch).loss
            self._end_forward()
            self._begin(len(self.blocks) + 1)
            if self.halves:
                split = Halves([get_gradient_edge(loss)], [torch.ones_like(loss)], self.entry)
                split.run_input()
            else:
                loss.backward()
            self._end_backward()
        return self.segments, self.hidden

    @contextmanager
    def _watched(self) -> Iterator[None]:
        handles = [p.register_post_accumulate_grad_hook(self._drop_gradient) for p in self.model.parameters() if p.requires_grad]
        for number, block in enumerate(self.blocks, 1):
            enter = lambda _, args, kwargs, number=number: self._enter(number, args, kwargs)  # noqa: E731
            handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.register_forward_hook(lambda _, __, output, number=number: self._leave(number, output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, number: int, *given: Any) -> None:
        self.entry = self.entry or [tensor for tensor in tensors_in(given) if tensor.requires_grad][:1]
        self._end_forward()
        self._begin(number)

    def _leave(self, number: int, output: Any) -> None:
        first = next(tensor for tensor in tensors_in(output) if tensor.requires_grad)
        self.hidden = first.numel() * first.element_size()
        first.register_hook(lambda _: self._turn(number))
        if number == len(self.blocks):
            self._enter(number + 1)

    def _turn(self, number: int) -> None:
        self._end_backward()
        self._begin(number)

    def _begin(self, number: int) -> None:
        self.number, self.level, self.came = number, self.count.now, 0
        self.count.peak = self.level

    def _end_forward(self) -> None:
        segment = self.segments[self.number]
        segment.kept, segment.forward = self.count.now - self.level, self.count.peak - self.level

    def _drop_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._note_rise()
        segment = self.segments[self.number]
        segment.late = max(segment.late, self.count.now - self.level)  # this one, beside the memory that it brings
        self.came += parameter.grad.nbytes
        parameter.grad = None
        self.count.peak = self.count.now

    def _note_rise(self) -> None:
        segment, rise = self.segments[self.number], self.count.peak - self.level
        segment.grown = max(segment.grown, rise + self.came)
        if self.came:
            segment.late = max(segment.late, rise)
        else:
            segment.early = max(segment.early, rise)

    def _end_backward(self) -> None:
        segment = self.segments[self.number]
        self._note_rise()
        segment.later = segment.kept + self.count.now - self.level
