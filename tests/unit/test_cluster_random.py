"""Random streams: the same by name and coordinates, their own place, nothing left behind."""

from __future__ import annotations

import torch

from phalanx.cluster.random import Streams, derive_seed


def _draw(streams: Streams, *name) -> torch.Tensor:
    with streams.fork(*name):
        return torch.rand(4)


def test_equal_names_draw_equal_numbers_and_different_ones_different():
    one, other = Streams(7), Streams(7)
    assert torch.equal(_draw(one, "dropout", 0), _draw(other, "dropout", 0))
    assert not torch.equal(_draw(one, "dropout", 1), _draw(other, "dropout", 0))
    assert not torch.equal(_draw(Streams(8), "dropout", 0), _draw(Streams(7), "dropout", 0))


def test_a_stream_keeps_its_place_and_leaves_the_outer_one():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    streams = Streams(0)
    first = _draw(streams, "a")
    assert torch.equal(torch.rand(4), expected)
    _draw(streams, "b")
    assert not torch.equal(_draw(streams, "a"), first)


def test_state_goes_on_where_it_was():
    streams = Streams(5)
    _draw(streams, "a")
    state = streams.state_dict()
    expected = _draw(streams, "a"), _draw(streams, "new")
    later = Streams(0)
    later.load_state_dict(state)
    assert torch.equal(_draw(later, "a"), expected[0])
    assert torch.equal(_draw(later, "new"), expected[1])


def test_seeds_do_not_change_between_versions():
    assert derive_seed(0, "dropout", 3) == derive_seed(0, "dropout", 3) < 2**63
    assert derive_seed(0, "dropout", 3) != derive_seed(0, "dropout", 4)
