"""The geometry of tensor parallelism on a grid: which features, which rows and which block of a weight a rank has.

Rows of the batch lie over `rows`, and so do the parts of each weight. Features lie over `slow` times `fast`: the stream between layers
counts its parts with `fast` running first, what is inside of an attention or an MLP with `slow` running first. Hence a product that
gathers over one of the two and adds up over the other leads from one order to the other, and the next one leads back. In two
dimensions `slow` has one rank, and both orders are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.cluster.mesh import Axis, make_axis
from phalanx.cluster.placement import Placement
from phalanx.errors import ShapeError
from phalanx.layout import Layout, Range, split_range, split_sizes

Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class Product:
    """One product on the grid, as one rank takes part in it.

    `sizes` are the features in that each rank of `enter` brings, `parts` the places, among the features out computed here, that each
    rank of `leave` keeps. `out_ranges` and `in_range` are the block of the weight, which lies in parts of `stored` along `rows`.
    """

    enter: Axis
    sizes: tuple[int, ...]
    leave: Axis
    parts: tuple[Ranges, ...]
    in_range: Range
    out_ranges: Ranges
    own: Ranges
    sharing: tuple[Axis, ...] = ()
    sharing_own: tuple[Axis, ...] = ()

    @property
    def num_out(self) -> int:
        return extent(self.out_ranges)


@dataclass(frozen=True)
class Grid:
    """The axes of one grid: `both` is `slow` times `fast`.

    `keep` holds gathered inputs and weights for the backward. `outputs_move` lets the second product of a pair, whose outputs are
    narrower than its inputs, move those: in two dimensions the inputs stay where they are then.
    """

    rows: Axis
    slow: Axis
    fast: Axis
    both: Axis
    keep: bool = False
    outputs_move: bool = False

    @property
    def stream_index(self) -> int:
        """This rank's part of the features between layers."""
        return self._stream(self.slow.index, self.fast.index)

    @property
    def group_index(self) -> int:
        """This rank's part of the heads or features inside of an attention or an MLP."""
        return self._group(self.slow.index, self.fast.index)

    def stream_sizes(self, width: int) -> tuple[int, ...]:
        """The features of the stream by rank of `both`."""
        return tuple(split_sizes(width, self.both.size))

    def stream_range(self, width: int) -> Range:
        return split_range(width, self.both.size, self.stream_index)

    def columns(self, in_width: int, out_ranges: Callable[[int], Ranges]) -> Product:
        """From the stream into a group whose part i has the features `out_ranges(i)` of the output; parts may be the same, not overlap."""
        slow, fast = self.slow, self.fast
        brought = [split_range(in_width, self.both.size, self._stream(slow.index, place)) for place in range(fast.size)]
        kept = [out_ranges(self._group(place, fast.index)) for place in range(slow.size)]
        whole = merged(kept)
        unions = [merged([out_ranges(self._group(place, column)) for place in range(slow.size)]) for column in range(fast.size)]
        owned = [out_ranges(self._group(*divmod(place, fast.size))) for place in range(self.both.size)]
        return Product(
            fast,
            tuple(stop - start for start, stop in brought),
            slow,
            tuple(places(part, whole) for part in kept),
            (brought[0][0], brought[-1][1]),
            whole,
            kept[slow.index],
            self._same(fast, unions),
            self._same(self.both, owned),
        )

    def out_of_group(self, in_range: Callable[[int], Range], out_width: int) -> Product:
        """From a group whose part i has the features `in_range(i)` of the input back into the stream."""
        slow, fast = self.slow, self.fast
        if slow.size == 1 and not self.outputs_move:
            enter, brought = fast, [in_range(self._group(0, place)) for place in range(fast.size)]
            leave, kept = slow, [split_range(out_width, self.both.size, self.stream_index)]
        else:
            enter, brought = slow, [in_range(self._group(place, fast.index)) for place in range(slow.size)]
            leave, kept = fast, [split_range(out_width, self.both.size, self._stream(slow.index, place)) for place in range(fast.size)]
        whole = merged([(part,) for part in kept])
        return Product(
            enter,
            tuple(stop - start for start, stop in brought),
            leave,
            tuple(places((part,), whole) for part in kept),
            (brought[0][0], brought[-1][1]),
            whole,
            (kept[leave.index],),
        )

    def across(self, in_width: int, out_width: int) -> Product:
        """From features that every rank has whole to parts of the output in the order of the stream, as logits are."""
        own = (split_range(out_width, self.both.size, self.stream_index),)
        none = self._alone()
        return Product(none, (in_width,), none, (((0, extent(own)),),), (0, in_width), own, own)

    def stored_sizes(self, size: int) -> tuple[int, ...]:
        """The parts along `rows` of a weight's first dimension, of which this grid column holds `size`."""
        return tuple(split_sizes(size, self.rows.size))

    def weight_placement(self, product: Product, shape: Sequence[int], *, transposed: bool) -> Placement:
        """The block of a projection's weight that this rank holds: 1/P of it, where nothing is shared."""
        dims = [product.out_ranges, (product.in_range,)]
        first, second = reversed(dims) if transposed else dims
        stored = part_of(first, self.rows.size, self.rows.index)
        return Placement(Layout.of_box(shape, [stored, second]), sums=product.sharing)

    def bias_placement(self, product: Product, shape: Sequence[int]) -> Placement:
        """The bias of the features that this rank keeps; other rows see it too."""
        return Placement(Layout.of_box(shape, [product.own]), sums=self.and_rows(product.sharing_own))

    def and_rows(self, sums: tuple[Axis, ...] = ()) -> tuple[Axis, ...]:
        """The axes over which gradients of what is not stored in parts are summed: other rows, and `sums`."""
        return (self.rows, *sums) if self.rows.size > 1 else sums

    def _stream(self, slow: int, fast: int) -> int:
        return slow * self.fast.size + fast

    def _group(self, slow: int, fast: int) -> int:
        return fast * self.slow.size + slow

    def _alone(self) -> Axis:
        return Axis("alone", (self.both.ranks[self.both.index],), 0)

    def _same(self, axis: Axis, held: Sequence[Ranges]) -> tuple[Axis, ...]:
        """The ranks of the axis that hold what this one holds, where there are several."""
        mine = held[axis.index]
        for other in held:
            if other != mine and extent(merged([mine, other])) < extent(merged([mine])) + extent(merged([other])):
                raise ShapeError(
                    f"parts of one projection share some features of {other} and {mine}, and not others",
                    allowed="parts with the same features, or with different ones",
                    remedy="as many key and value heads as parts, or projections that are not fused",
                )
        same = [axis.ranks[place] for place, ranges in enumerate(held) if ranges == held[axis.index]]
        if len(same) == 1 or not extent(held[axis.index]):
            return ()
        return (axis if len(same) == axis.size else make_axis(f"{axis.name}:shared", same, axis.ranks[axis.index]),)


def merged(parts: Sequence[Ranges]) -> Ranges:
    """The union of several sets of ranges, ascending; what touches is joined."""
    found: list[Range] = []
    for start, stop in sorted(pair for part in parts for pair in part if pair[0] < pair[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found) or ((0, 0),)


def places(part: Ranges, whole: Ranges) -> Ranges:
    """Where the features `part` lie among those of `whole`, which has them all."""
    found: list[Range] = []
    for start, stop in part:
        offset = 0
        for first, last in whole:
            if first <= start < stop <= last:
                found.append((offset + start - first, offset + stop - first))
                break
            offset += last - first
    return tuple(found) or ((0, 0),)


def part_of(ranges: Ranges, parts: int, index: int) -> Ranges:
    """Part `index` of the features in `ranges`, counted through."""
    low, high = split_range(extent(ranges), parts, index)
    found: list[Range] = []
    offset = 0
    for start, stop in ranges:
        first, last = max(low, offset), min(high, offset + stop - start)
        if first < last:
            found.append((start + first - offset, start + last - offset))
        offset += stop - start
    return tuple(found) or ((0, 0),)


def extent(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)
