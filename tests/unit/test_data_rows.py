"""Rows of a batch: counted and taken in any structure, the spare row, and what cannot be told apart."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch

from phalanx.data import num_rows, spare_row, take_rows
from phalanx.errors import ShapeError

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    image: torch.Tensor
    name: list
    scale: float


def test_take_rows_keeps_the_structure():
    x = torch.arange(12).reshape(4, 3)
    batch = {
        "x": x,
        "nested": [x[:, 0], (x[:, 1], "whole")],
        "pair": Pair(x, numpy.arange(4)),
        "sample": Sample(x, ["a", "b", "c", "d"], 0.5),
        "matrix": torch.ones(7, 4),
        "scalar": torch.tensor(3.0),
    }
    part = take_rows(batch, 1, 3)
    assert part["x"].tolist() == [[3, 4, 5], [6, 7, 8]]
    assert part["nested"][0].tolist() == [3, 6]
    assert part["nested"][1] == (pytest.approx(torch.tensor([4, 7])), "whole")
    assert isinstance(part["pair"], Pair)
    assert part["pair"].y.tolist() == [1, 2]
    assert part["sample"].name == ["b", "c"]
    assert part["sample"].scale == 0.5
    assert part["matrix"].shape == (7, 4)
    assert part["scalar"].shape == ()
    assert spare_row(part) is None


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(list, items)])
def test_take_rows_keeps_the_mapping(kind):
    batch = kind({"x": torch.arange(4)})
    part = take_rows(batch, 2, 4)
    assert type(part) is type(batch)
    assert part["x"].tolist() == [2, 3]
    assert batch["x"].tolist() == [0, 1, 2, 3]


def test_ragged_items_in_a_list_are_rows():
    images = [torch.zeros(3, size) for size in (4, 5, 6, 7)]
    part = take_rows({"images": images, "labels": torch.arange(4), "also": torch.arange(4)}, 2, 3)
    assert [image.shape for image in part["images"]] == [(3, 6)]


def test_no_rows_carry_a_spare_row():
    batch = {"x": torch.arange(6).reshape(3, 2), "name": ["a", "b", "c"], "table": torch.ones(5)}
    part = take_rows(batch | {"y": torch.arange(3)}, 3, 3)
    assert part["x"].shape == (0, 2)
    assert part["name"] == []
    assert part["table"].shape == (5,)
    spare = spare_row(part)
    assert spare["x"].tolist() == [[0, 1]]
    assert spare["name"] == ["a"]
    assert spare["table"].shape == (5,)
    assert spare_row(take_rows(batch | {"y": torch.arange(3)}, 0, 1)) is None


def test_num_rows_goes_with_the_majority():
    assert num_rows({"positions": torch.arange(12), "ids": torch.zeros(8, 12), "labels": torch.zeros(8, 12)}) == 8
    assert num_rows(torch.zeros(5, 2)) == 5
    assert num_rows([torch.zeros(1, 12), torch.zeros(1)]) == 1
    assert num_rows([{"ids": torch.zeros(4, 12)}, torch.zeros(4)]) == 4
    assert num_rows(["a", "b", "c"]) == 3
    assert num_rows([{"id": 1}, {"id": 2}]) == 2


@pytest.mark.parametrize(
    "batch",
    [
        {"ids": torch.zeros(8, 12), "scale": torch.zeros(3)},
        [torch.zeros(5), torch.zeros(5), torch.zeros(7)],  # three ragged rows, or five rows and a table?
        [{"ids": torch.zeros(12)}, {"ids": torch.zeros(12)}],  # two rows of 12, or two parts of 12 rows?
        ([torch.zeros(3, 4), torch.zeros(3, 5)], [torch.zeros(3), torch.zeros(3)]),
        {"images": [torch.zeros(3, 4), torch.zeros(3, 5)]},
        {"scale": torch.tensor(1.0)},
        torch.tensor(1.0),
    ],
)
def test_num_rows_refuses_what_it_cannot_tell(batch):
    with pytest.raises(ShapeError, match="cannot be told apart"):
        num_rows(batch)


TABLE = torch.arange(3.0)
IMAGES = [torch.full((3, 2), float(row)) for row in range(6)]  # three channels each

# name -> (a batch of six rows, what belongs to all of it): cut to three rows, a first dimension tells them apart no longer
LIKE_THE_ROWS = {
    "a tensor": ({"x": torch.zeros(6, 8), "y": torch.zeros(6), "whole": TABLE}, TABLE),
    "an array": ({"x": numpy.zeros((6, 8)), "y": numpy.zeros(6), "whole": numpy.arange(3.0)}, numpy.arange(3.0)),
    "a list": ({"x": torch.zeros(6, 8), "whole": ["a", "b", "c"]}, ["a", "b", "c"]),
    "a tuple of tensors": ({"x": torch.zeros(6), "y": torch.zeros(6), "whole": (TABLE[0], TABLE[1], TABLE[2])}, (0.0, 1.0, 2.0)),
    "beside lists only": ({"x": list("abcdef"), "y": list(range(6)), "whole": TABLE}, TABLE),
    "a list beside lists and a scalar": ({"x": list("abcdef"), "scale": TABLE[1], "whole": [1, 2, 3]}, [1, 2, 3]),
    "an array beside lists": ({"x": list("abcdef"), "y": list(range(6)), "whole": numpy.arange(3.0)}, numpy.arange(3.0)),
}


@pytest.mark.parametrize("name", LIKE_THE_ROWS)
@pytest.mark.parametrize("wrap", [dict, lambda items: Pair(items, 0), lambda items: {"x": [items], "y": items["x"]}])
def test_what_stayed_whole_stays_whole(name, wrap):
    full, whole = LIKE_THE_ROWS[name]
    find = {Pair: lambda part: part.x}.get(type(wrap(full)), lambda part: part if "whole" in part else part["x"][0])
    for start, stop in ((0, 3), (3, 6)):
        local = take_rows(wrap(full), start, stop, total=6)
        for again in (take_rows(local, 0, 2, total=3), take_rows(take_rows(local, 0, 3, total=3), 2, 3, total=3)):
            found = find(again)["whole"]
            assert len(found) == 3
            assert all(a == b for a, b in zip(found, whole))
            assert len(find(again)["x"]) in (1, 2)
    assert find(spare_row(take_rows(wrap(full), 6, 6, total=6)))["whole"] is not None


@pytest.mark.parametrize("others", [{"labels": torch.arange(6)}, {"names": list("abcdef")}])
def test_items_of_a_list_stay_items(others):
    local = take_rows({"images": IMAGES, **others}, 3, 6, total=6)
    for start in range(3):
        (image,) = take_rows(local, start, start + 1, total=3)["images"]
        assert torch.equal(image, IMAGES[3 + start])


def test_a_shared_tensor_is_judged_in_each_batch_by_itself():
    shared = torch.arange(3)
    first = take_rows({"x": torch.zeros(6), "y": torch.zeros(6), "shared": shared}, 0, 3)
    second = take_rows({"x": torch.zeros(3), "y": torch.zeros(3), "shared": shared}, 1, 3)
    assert first["shared"] is shared
    assert second["shared"].tolist() == [1, 2]
    assert take_rows(second, 1, 2)["shared"].tolist() == [2]
    assert take_rows(first, 1, 2)["shared"].tolist() == [0, 1, 2]
    # Beside tensors that no cut made, nothing is known of it.
    assert take_rows({"x": torch.zeros(3), "y": torch.zeros(3), "shared": shared}, 0, 1)["shared"].tolist() == [0]


def test_what_is_added_to_a_cut_batch_goes_by_its_first_dimension():
    local = take_rows({"x": torch.zeros(6), "y": torch.zeros(6), "whole": TABLE}, 0, 3)
    part = take_rows({**local, "mask": local["x"] > 0, "table": torch.zeros(4)}, 0, 1)
    assert [len(part[key]) for key in ("x", "y", "whole", "mask", "table")] == [1, 1, 3, 1, 4]
