"""Random tensors cut in random ways: what the tests of checkpoints share."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from phalanx.checkpoint import disk
from phalanx.cluster.mesh import Axis
from phalanx.layout import Layout, Piece, split_range

ALONE = Axis("world", (0,), 0)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)
SHAPES = ((), (0,), (1,), (3,), (7,), (0, 3), (3, 1), (7, 3), (5, 7), (3, 4, 5), (2, 0, 3))


def random_tensor(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2 if dtype is torch.bool else 100, tuple(shape), generator=generator).to(dtype)


def random_layouts(shape: Sequence[int], ranks: int, choose: random.Random) -> list[Layout]:
    """One layout for each rank: a grid of boxes over up to two dims, and each box cut into runs for the ranks that share it."""
    runs = choose.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    grid, left = [1] * len(shape), ranks // runs
    if shape:
        first = choose.choice([size for size in range(1, left + 1) if left % size == 0])
        grid[choose.randrange(len(shape))] *= first
        grid[choose.randrange(len(shape))] *= left // first
    else:
        runs = ranks
    layouts = []
    for rank in range(ranks):
        place, run = divmod(rank, runs)
        box = []
        for size, parts in zip(shape, grid):
            place, index = divmod(place, parts)
            box.append(part_of(size, parts, index))
        whole = Layout.of_box(shape, box)
        layouts.append(whole.with_run(*split_range(whole.num_elements, runs, run)))
    return layouts


def part_of(size: int, parts: int, index: int) -> list[tuple[int, int]]:
    """A part of a dimension; of one of odd size, seen as two things fused behind one another, a part of each."""
    seam = size // 3 if size % 2 else 0
    (first, last), (start, stop) = split_range(seam, parts, index), split_range(size - seam, parts, index)
    return [(first, last), (seam + start, seam + stop)]


def cut(name: str, full: torch.Tensor, layout: Layout) -> Piece:
    """The piece of a full tensor that a layout names."""
    return Piece(name, layout.take(full).reshape(-1)[slice(*layout.run)].clone(), layout)


def blank(piece: Piece) -> Piece:
    """A piece with the same place and other content."""
    return Piece(piece.name, torch.ones_like(piece.tensor), piece.layout)


def some_pieces(seed: int = 0) -> list[Piece]:
    """A few whole tensors of different kinds."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "layers.0.weight": random_tensor((5, 7), torch.float32, generator),
        "layers.0.bias": random_tensor((7,), torch.bfloat16, generator),
        "steps": random_tensor((), torch.int64, generator),
        "nothing": random_tensor((0, 3), torch.float64, generator),
    }
    return [Piece(name, tensor, Layout.whole(tensor.shape)) for name, tensor in tensors.items()]


def same(pieces: Sequence[Piece], others: Sequence[Piece]) -> bool:
    return all(torch.equal(piece.tensor, other.tensor) for piece, other in zip(pieces, others, strict=True))


STEPS = ("write_all", "flush", "flush_directory", "rename", "make_directory")


def killed(at: int, work: Callable[[], object]) -> bool:
    """Does `work` in a process of its own that kills itself before its `at`-th step on the disk; whether it was killed.

    A directory that is removed at that moment has lost one of its files.
    """
    child = os.fork()
    if not child:
        count = 0

        def tear(path: Path) -> None:
            os.remove(next(Path(path).iterdir()))

        def before(step, half=lambda *_: None):
            def counted(*arguments):
                nonlocal count
                if count == at:
                    half(*arguments)
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return step(*arguments)

            return counted

        for name in STEPS:
            setattr(disk, name, before(getattr(disk, name)))
        shutil.rmtree = before(shutil.rmtree, tear)  # type: ignore[assignment]
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
