"""What is told of a micro-batch without looking at its numbers."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.parallel.pipeline.handed import arrangement, signature


class Note:
    pass


@dataclass
class Rows:
    words: torch.Tensor
    note: Any = None


def test_ranks_tell_equal_rows_by_equal_signatures():
    """Two objects of one kind show different places in memory, and so do those of two ranks."""
    words = torch.arange(12).view(3, 4)
    for make in (lambda note: {"words": words, "notes": [note] * 3}, lambda note: Rows(words, note), lambda note: (words, note)):
        assert signature(make(Note())) == signature(make(Note()))
        assert hash(signature(make(Note()))) == hash(signature(make(Note())))


def test_a_signature_has_every_shape_in_any_container():
    long, short = torch.zeros(3, 40), torch.zeros(3, 39)
    for make in (UserDict, lambda rows: Rows(**rows), lambda rows: {"inner": [rows]}):
        assert signature(make({"words": long})) != signature(make({"words": short}))
        assert arrangement(make({"words": long})) == arrangement(make({"words": short}))


def test_an_arrangement_has_switches_and_absences_and_no_numbers():
    words = torch.zeros(3)
    assert arrangement({"words": words, "mask": None}) != arrangement({"words": words, "mask": words})
    assert arrangement({"words": words, "flag": True}) != arrangement({"words": words, "flag": False})
    assert arrangement({"words": words, "step": 3}) == arrangement({"words": words, "step": 4})
