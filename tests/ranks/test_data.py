"""Loaders on several processes: what ranks read together, agree on, and count."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

from phalanx.cluster import comm, launch
from phalanx.cluster.mesh import Axis, Mesh
from phalanx.data import boost_loader, gather_rows, spare_row
from phalanx.errors import CommError, ConfigError, ShapeError
from phalanx.testing import run_ranks


class Numbers(Dataset):
    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        return {"id": index, "noise": torch.rand(())}


class Stream(IterableDataset):
    def __init__(self, size: int):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def data_axis() -> Axis:
    return Mesh({"dp": launch.world().size}).axis("dp")


def ids(batches) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def own_seed() -> None:
    """Lets the ranks' random states differ, as those of a program may."""
    torch.manual_seed(launch.world().rank)
    random.seed(launch.world().rank)


def evaluate() -> list[str]:
    """The cases in which the gathered ids are not those of one process."""
    axis, wrong = data_axis(), []
    for size, batch in ((1, 1), (1, 4), (5, 2), (7, 3), (9, 4), (16, 4), (17, 4)):
        loaders = {
            "map": DataLoader(Numbers(size), batch_size=batch, collate_fn=lambda rows: torch.tensor([row["id"] for row in rows])),
            "stream": DataLoader(Stream(size), batch_size=batch),
        }
        for kind, loader in loaders.items():
            parts = [gather_rows(rows, axis) for rows in boost_loader(loader, axis=axis)]
            if torch.cat(parts).tolist() != list(range(size)):
                wrong.append(f"{kind} {size} {batch}")
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_evaluation_counts_each_sample_once(world):
    # All sizes and batches are in the unit tests; here the gathering and the agreement on the end are real.
    assert run_ranks(evaluate, world) == [[]] * world


def read_with_tensor_ranks(custom: bool, workers: int) -> tuple[int, list[int], list[float]]:
    own_seed()
    mesh = Mesh({"dp": 2, "pp": 2, "cp": 1, "tp": 2})
    dataset = Numbers(25)
    order = {"sampler": SubsetRandomSampler(range(25))} if custom else {"shuffle": True}
    loader = boost_loader(DataLoader(dataset, batch_size=4, num_workers=workers, **order), axis=mesh.axis("dp"), world=mesh.world)
    batches = list(loader)
    return mesh.index("dp"), ids(batches), [value for batch in batches for value in batch["noise"].tolist()]


@pytest.mark.parametrize(("custom", "workers"), [(False, 0), (True, 0), (True, 2)])
def test_ranks_of_one_data_index_read_the_same(custom, workers):
    results = run_ranks(read_with_tensor_ranks, 8, custom, workers)
    per_index = {index: [result for result in results if result[0] == index] for index in (0, 1)}
    assert all(len(same) == 4 and all(result == same[0] for result in same) for same in per_index.values())
    first, second = per_index[0][0][1], per_index[1][0][1]
    assert not set(first) & set(second)
    assert sorted(first + second) == list(range(25))
    assert first + second != list(range(25))


def read_some(state: dict | None, count: int | None, custom: bool) -> tuple[list[int], dict]:
    own_seed()
    axis = data_axis()
    order = {"sampler": SubsetRandomSampler(range(40))} if custom else {"shuffle": True}
    loader = boost_loader(DataLoader(Numbers(40), batch_size=4, num_workers=2, **order), axis=axis)
    if state is not None:
        loader.load_state_dict(state)
    seen: list[int] = []
    for batch in loader:
        seen += gather_rows(batch["id"], axis).tolist()
        if len(seen) == count:
            break
    return seen, loader.state_dict()


@pytest.mark.parametrize("custom", [False, True])
def test_stopped_on_four_ranks_goes_on_with_two_and_three(custom):
    seen, state = run_ranks(read_some, 4, None, 12, custom)[0]
    whole, _ = run_ranks(read_some, 1, None, None, custom)[0]
    assert sorted(whole) == list(range(40))
    assert whole[:12] == seen
    for world in (2, 3):
        for rest, _ in run_ranks(read_some, world, state, None, custom):
            assert seen + rest == whole


def stop_with_the_shortest() -> tuple[int, int]:
    axis = data_axis()
    loader = boost_loader([torch.arange(5)] * (4 + axis.index), axis=axis)
    first = sum(1 for _ in loader)
    return first, sum(1 for _ in loader)


def test_all_ranks_end_with_the_shortest_stream():
    assert run_ranks(stop_with_the_shortest, 3) == [(4, 4)] * 3


def count_collectives() -> tuple[int, int]:
    axis = data_axis()
    with comm.ledger.record() as map_rows:
        list(boost_loader(DataLoader(Numbers(9), batch_size=2, shuffle=True), axis=axis))
    with comm.ledger.record() as stream_rows:
        list(boost_loader([torch.arange(3)] * 4, axis=axis))
    return sum(row[2] for row in map_rows), sum(row[2] for row in stream_rows)


def test_only_streams_cost_a_collective():
    assert run_ranks(count_collectives, 2) == [(0, 5)] * 2  # one a batch, and one for the end


def disagree_on_rows() -> str:
    axis = data_axis()
    try:
        list(boost_loader([torch.arange(4), torch.arange(5 + axis.index)], axis=axis))
    except ShapeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_read_other_batches_are_told():
    results = run_ranks(disagree_on_rows, 2)
    assert results[0] == results[1]
    assert "batch 1 of the stream has 5 rows on one rank and 6 on another" in results[0]


def empty_on_all() -> list[str]:
    axis, messages = data_axis(), []
    for make in (lambda: DataLoader(Numbers(0)), lambda: [], lambda: DataLoader(Stream(0)), lambda: DataLoader(Numbers(3), sampler=[])):
        try:
            list(boost_loader(make(), axis=axis))
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_empty_data_is_refused_on_every_rank():
    results = run_ranks(empty_on_all, 2)
    assert results[0] == results[1]
    assert len(results[0]) == 4


class Broken(Numbers):
    def __getitem__(self, index: int) -> dict:
        if index == 3:
            raise ValueError("sample 3 is broken")
        return super().__getitem__(index)


def read_broken() -> None:
    axis = data_axis()
    for _ in boost_loader(DataLoader(Broken(8), batch_size=4), axis=axis):
        comm.barrier(axis)


def test_a_broken_sample_names_its_rank():
    with pytest.raises(CommError, match="sample 3 is broken") as error:
        run_ranks(read_broken, 2)
    assert error.value.rank == 1


def spare_rows() -> list[list]:
    axis = data_axis()
    from_rows = list(boost_loader(DataLoader(Numbers(4), batch_size=3), axis=axis))
    from_stream = list(boost_loader([{"id": torch.arange(3)}, {"id": torch.arange(3, 4)}], axis=axis))
    return [
        [(batch["id"].tolist(), spare_row(batch)["id"].tolist() if spare_row(batch) else None) for batch in batches]
        for batches in (from_rows, from_stream)
    ]


def test_ranks_without_rows_have_a_spare_one():
    results = run_ranks(spare_rows, 4)
    for from_rows, from_stream in results:
        assert from_rows == from_stream
    assert [result[0] for result in results] == [
        [([0], None), ([3], None)],
        [([1], None), ([], [3])],
        [([2], None), ([], [3])],
        [([], [0]), ([], [3])],
    ]
