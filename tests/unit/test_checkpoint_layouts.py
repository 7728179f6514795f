"""Any layout loads any layout: the arithmetic, and whole checkpoints of random cuts."""

import math
import random

import numpy as np
import pytest
import torch
from checkpoint_cases import ALONE, DTYPES, SHAPES, blank, cut, random_layouts, random_tensor

from phalanx.checkpoint import load, save, spans
from phalanx.checkpoint.shard_file import ShardFile
from phalanx.errors import CheckpointError
from phalanx.layout import Layout, Piece


@pytest.mark.parametrize("seed", range(20))
def test_tables_are_the_spans_of_the_layout(seed):
    choose = random.Random(seed)
    for shape in SHAPES:
        numbers = torch.arange(math.prod(shape)).reshape(shape)
        for layout in random_layouts(shape, choose.randint(1, 6), choose):
            table = spans.table(layout)
            named = [start + at for _, start, length in table.tolist() for at in range(length)]
            assert named == cut("x", numbers, layout).tensor.tolist()
            assert table[:, 0].tolist() == [sum(table[:at, 2]) for at in range(len(table))]
            assert (table[:, 2] > 0).all()
            assert spans.bounds(layout) == ((table[0, 1], table[-1, 1] + table[-1, 2] - 1) if len(table) else (0, -1))


@pytest.mark.parametrize("seed", range(20))
def test_overlaps_windows_and_strides_name_each_common_element_once(seed):
    choose = random.Random(seed)
    shape = choose.choice([(7, 9), (3, 4, 5), (40,), (2, 3, 2, 5)])
    numbers = torch.arange(Layout.whole(shape).num_elements).reshape(shape)
    saved = [cut("x", numbers, layout) for layout in random_layouts(shape, choose.randint(1, 6), choose)]
    for layout in random_layouts(shape, choose.randint(1, 6), choose):
        wanted = cut("x", numbers, layout).tensor
        found = torch.full_like(wanted, -1)
        for piece in saved:
            overlap = spans.overlap(spans.table(layout), spans.table(piece.layout))
            for group in spans.cut(overlap, 8):
                assert group[0, 1] // 8 == (group[-1, 1] + group[-1, 2] - 1) // 8
                for (to, start, length), count, step in spans.strided(group):
                    for repeat in range(count):
                        first, source = to + repeat * step[0], start + repeat * step[1]
                        assert (found[first : first + length] == -1).all()
                        found[first : first + length] = piece.tensor[source : source + length]
        assert torch.equal(found, wanted)


def test_a_column_slice_is_one_strided_copy():
    wanted = spans.table(Layout((1000, 8), ((0, 1000), (2, 5)), (0, 3000)))
    overlap = spans.overlap(wanted, spans.table(Layout.whole((1000, 8))))
    assert [(count, step.tolist()) for _, count, step in spans.strided(overlap)] == [(1000, [3, 8, 0])]
    assert len(list(spans.strided(np.zeros((0, 3), dtype=np.int64)))) == 0


@pytest.mark.parametrize("seed", range(24))
def test_what_n_ranks_saved_m_ranks_load(tmp_path, seed):
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    fulls = {f"{index}.{dtype}": random_tensor(choose.choice(SHAPES), dtype, generator) for dtype in DTYPES for index in range(3)}
    saving, loading = choose.randint(1, 6), choose.randint(1, 6)
    pieces = [cut(name, full, layout) for name, full in fulls.items() for layout in random_layouts(full.shape, saving, choose)]
    choose.shuffle(pieces)
    save(tmp_path / "at", pieces, {}, {}, ALONE, max_file_bytes=choose.choice([64, 500, 1 << 20]))
    wanted = [cut(name, full, layout) for name, full in fulls.items() for layout in random_layouts(full.shape, loading, choose)]
    blanks = [blank(piece) for piece in wanted]
    load(tmp_path / "at", blanks, ALONE)
    for piece, filled in zip(wanted, blanks, strict=True):
        assert torch.equal(piece.tensor, filled.tensor), piece.name


def test_tensors_that_are_not_contiguous_are_saved_and_filled(tmp_path):
    tensor = torch.arange(12.0).reshape(3, 4).T
    save(tmp_path / "at", [Piece("x", tensor, Layout.whole((4, 3)))], {}, {}, ALONE)
    filled = torch.zeros(3, 4).T
    load(tmp_path / "at", [Piece("x", filled, Layout.whole((4, 3)))], ALONE)
    assert torch.equal(filled, tensor)


def test_parameters_are_filled_in_place(tmp_path):
    weight = torch.nn.Parameter(torch.arange(6.0))
    save(tmp_path / "at", [Piece("x", weight, Layout.whole((6,)))], {}, {}, ALONE)
    other = torch.nn.Parameter(torch.zeros(6))
    storage = other.data_ptr()
    load(tmp_path / "at", [Piece("x", other, Layout.whole((6,)))], ALONE)
    assert torch.equal(other, weight)
    assert other.data_ptr() == storage


def test_large_windows_and_small_ones_read_the_same(tmp_path, monkeypatch):
    full = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    save(tmp_path / "at", [Piece("x", full, Layout.whole(full.shape))], {}, {}, ALONE)
    monkeypatch.setattr("phalanx.checkpoint.filling.WINDOW_BYTES", 64)
    monkeypatch.setattr("phalanx.checkpoint.shard_file.BLOCK_BYTES", 100)
    wanted = cut("x", full, Layout((64, 33), ((3, 60), (5, 17)), (7, 600)))
    filled = Piece("x", torch.zeros_like(wanted.tensor), wanted.layout)
    load(tmp_path / "at", [filled], ALONE)
    assert torch.equal(filled.tensor, wanted.tensor)


def test_only_windows_with_wanted_elements_are_read(tmp_path, monkeypatch):
    full = torch.arange(4096.0).reshape(64, 64)
    save(tmp_path / "at", [Piece("x", full, Layout.whole(full.shape))], {}, {}, ALONE)
    read_into, read = ShardFile.read_into, []
    monkeypatch.setattr(ShardFile, "read_into", lambda self, key, start, out: (read.append(out.nbytes), read_into(self, key, start, out)))
    monkeypatch.setattr("phalanx.checkpoint.filling.WINDOW_BYTES", 1024)
    for box, most in ((((3, 5), (0, 64)), 2 * 256), (((0, 64), (3, 5)), 16384), (((8, 12), (3, 5)), 1024)):
        layout = Layout((64, 64), box, (0, math.prod(stop - start for start, stop in box)))
        wanted = cut("x", full, layout)
        read.clear()
        load(tmp_path / "at", [blank(wanted)], ALONE, verify=False)
        assert wanted.tensor.nbytes <= sum(read) <= most


def test_elements_that_nobody_owns_or_two_own_are_refused_when_saving(tmp_path):
    whole = Layout.whole((6,))
    cancelling = [whole.with_run(0, 3), whole.with_run(2, 5)]
    for layouts in ([whole.with_run(0, 5)], [whole.with_run(0, 4), whole.with_run(3, 6)], cancelling):
        pieces = [Piece("x", torch.zeros(layout.num_elements), layout) for layout in layouts]
        with pytest.raises(CheckpointError, match=r"x \(\d of 6 elements\)"):
            save(tmp_path / "at", pieces, {}, {}, ALONE)
    with pytest.raises(CheckpointError, match=r"x \(0 of 6 elements\)"):
        save(tmp_path / "at", [Piece("x", torch.zeros(6), whole, owned=False)], {}, {}, ALONE)
    assert not list(tmp_path.iterdir())


def test_put_is_the_inverse_of_take():
    full = torch.arange(60).reshape(3, 4, 5)
    layout = Layout.of_box(full.shape, [(0, 3), [(0, 1), (2, 4)], [(1, 2), (3, 5)]])
    assert torch.equal(layout.take(full), full[:, [0, 2, 3]][:, :, [1, 3, 4]])
    other = torch.zeros_like(full)
    layout.put(other, layout.take(full))
    assert torch.equal(layout.take(other), layout.take(full))
    assert other.count_nonzero() == layout.num_elements
    assert Layout.of_box((6,), [[(0, 2), (2, 5)]]).box == (((0, 5),),)
