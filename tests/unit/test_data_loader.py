"""The boosted loader on one process: every index of the data axis in turn, against the plain order of samples."""

import random
from functools import partial
from itertools import chain

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from phalanx.cluster.mesh import Axis
from phalanx.data import boost_loader, spare_row
from phalanx.errors import ConfigError

ALONE = Axis("world", (0,), 0)


class Numbers(Dataset):
    """Samples that are their own index, and what was read."""

    def __init__(self, size: int):
        self.size, self.read = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        self.read.append(index)
        noise = torch.rand(()).item() + random.random() + numpy.random.rand()
        return {"id": index, "noise": torch.tensor(noise, dtype=torch.float64)}


class Stream(IterableDataset):
    def __init__(self, size: int, shares: bool = True):
        self.size, self.shares = size, shares

    def __iter__(self):
        info = get_worker_info() if self.shares else None
        return iter(range(info.id, self.size, info.num_workers) if info else range(self.size))


def data_axis(size: int, index: int) -> Axis:
    return Axis("dp", tuple(range(size)), index)


def boosted(make_loader, ranks: int, seed: int = 0) -> list:
    """The loaders of all data indices, made as if each were alone, so that none waits for another."""
    return [boost_loader(make_loader(), axis=data_axis(ranks, index), seed=seed, world=ALONE) for index in range(ranks)]


def ids(batches) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def passes(loaders) -> list[list[int]]:
    """One pass of all loaders together: the ids of each global batch, put together in the order of the axis."""
    return [ids(parts) for parts in zip(*loaders, strict=True)]


# ------------------------------------------------------------------------------------------------ which rows


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_evaluation_counts_each_sample_once(ranks, batch):
    for size in range(1, 18):
        plain = [item.tolist() for item in DataLoader(range(size), batch_size=batch)]
        loaders = boosted(partial(DataLoader, Numbers(size), batch_size=batch), ranks)
        assert passes(loaders) == plain
        assert all(len(loader) == len(plain) for loader in loaders)
        streams = boosted(partial(DataLoader, Stream(size), batch_size=batch), ranks)
        assert [[number for part in parts for number in part.tolist()] for parts in zip(*streams, strict=True)] == plain


def test_each_index_reads_only_its_rows():
    datasets = [Numbers(16) for _ in range(2)]
    for index, dataset in enumerate(datasets):
        list(boost_loader(DataLoader(dataset, batch_size=8), axis=data_axis(2, index), world=ALONE))
    assert datasets[0].read == [0, 1, 2, 3, 8, 9, 10, 11]
    assert datasets[1].read == [4, 5, 6, 7, 12, 13, 14, 15]


def test_an_index_without_rows_gets_a_spare_row():
    *_, last = boosted(lambda: DataLoader(Numbers(5), batch_size=3), 4)
    first, second = list(last)
    assert first["id"].shape == first["noise"].shape == (0,)
    assert spare_row(first)["id"].tolist() == [0]
    assert spare_row(second)["id"].tolist() == [3]


@pytest.mark.parametrize("drop_last", [False, True])
def test_shuffle_is_seeded_and_the_same_for_every_number_of_ranks(drop_last):
    def make():
        return DataLoader(Numbers(23), batch_size=5, shuffle=True, drop_last=drop_last)

    orders = {ranks: [passes(boosted(make, ranks)) for _ in range(2)] for ranks in (1, 2, 3, 7)}
    assert all(order == orders[1][0] for pair in orders.values() for order in pair)
    flat = list(chain.from_iterable(orders[1][0]))
    assert len(set(flat)) == len(flat) == (20 if drop_last else 23)
    assert flat != sorted(flat)
    assert passes(boosted(make, 1, seed=1)) != orders[1][0]
    loaders = boosted(make, 2)
    epochs = [passes(loaders) for _ in range(3)]
    assert epochs[0] == orders[1][0]
    assert epochs[0] != epochs[1] != epochs[2]
    for loader in loaders:
        loader.set_epoch(1)
    assert passes(loaders) == epochs[1]


def test_the_generator_of_the_person_seeds_the_shuffle():
    def order(seed):
        loader = DataLoader(Numbers(30), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))
        return ids(boost_loader(loader, axis=ALONE))

    assert order(1) == order(1) != order(2)


def test_replacement_and_num_samples_are_honoured():
    def order(**arguments):
        dataset = Numbers(6)
        loader = DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset, **arguments))
        return ids(boost_loader(loader, axis=ALONE))

    drawn = order(replacement=True, num_samples=50)
    assert len(drawn) == 50
    assert set(drawn) <= set(range(6))
    assert sorted(order(num_samples=15)[:12]) == sorted([*range(6)] * 2)
    assert len(set(order(num_samples=4))) == 4


def test_custom_samplers_keep_their_batches():
    lists = [[5, 1], [0], [2, 4, 3]]
    assert passes(boosted(lambda: DataLoader(Numbers(6), batch_sampler=lists), 2)) == lists
    assert passes(boosted(lambda: DataLoader(Numbers(6), sampler=[3, 1, 4], batch_size=2), 2)) == [[3, 1], [4]]
    weights = [0.0, 1.0, 1.0, 0.0]
    sampler = BatchSampler(WeightedRandomSampler(weights, 8), 4, drop_last=False)
    drawn = ids(boost_loader(DataLoader(Numbers(4), batch_sampler=sampler), axis=ALONE))
    assert len(drawn) == 8
    assert set(drawn) <= {1, 2}


def test_string_batches_and_fast_reading_keep_working():
    class Many(Numbers):
        def __getitems__(self, indices):
            return [{"id": index, "text": f"sample {index}"} for index in indices]

    loaders = boosted(lambda: DataLoader(Many(3), batch_size=3), 4)
    assert [next(iter(loader))["text"] for loader in loaders] == [["sample 0"], ["sample 1"], ["sample 2"], []]


# ------------------------------------------------------------------------------------------------ the place in the data


def resumed(make_loader, state: dict, ranks: int) -> list:
    loaders = boosted(make_loader, ranks)
    for loader in loaders:
        loader.load_state_dict(state)
    return loaders


@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_on_four_ranks_goes_on_with_two_and_three(workers):
    def make():
        return DataLoader(Numbers(40), batch_size=4, shuffle=True, num_workers=workers)

    whole = ids(boost_loader(DataLoader(Numbers(40), batch_size=4, shuffle=True), axis=ALONE))
    loaders = boosted(make, 4)
    seen = []
    for parts in zip(*loaders):
        seen += ids(parts)
        if len(seen) == 12:
            states = [loader.state_dict() for loader in loaders]
            break
    assert all(state == states[0] for state in states)
    assert (states[0]["samples"], states[0]["batches"]) == (12, 3)  # whatever the workers have read ahead
    for ranks in (2, 3):
        loaders = resumed(make, states[0], ranks)
        assert seen + list(chain.from_iterable(passes(loaders))) == whole
        assert [loader.epoch for loader in loaders] == [1] * ranks


@pytest.mark.parametrize("seed", range(12))
def test_any_place_resumes_exactly(seed):
    draw = random.Random(seed)
    size, batch, stop = draw.randint(1, 40), draw.randint(1, 7), draw.randint(1, 12)
    drop_last = draw.random() < 0.5 and size >= batch
    workers = 2 if seed < 2 else 0

    def make():
        return DataLoader(Numbers(size), batch_size=batch, shuffle=True, drop_last=drop_last, num_workers=workers)

    def steps(loader, count):
        """`count` batches of as many passes as it takes, and the place after each."""
        while True:
            for item in loader:
                yield item["id"].tolist(), item["noise"].tolist(), loader.state_dict()
                count -= 1
                if not count:
                    return

    never_stopped = list(steps(boost_loader(make(), axis=ALONE, seed=seed), stop + 9))
    (second,) = resumed(make, never_stopped[stop - 1][2], 1)
    assert list(steps(second, 9)) == never_stopped[stop:]


def test_a_place_holds_under_another_batch_size():
    (first,) = boosted(lambda: DataLoader(Numbers(20), batch_size=4, shuffle=True), 1)
    batches = iter(first)
    seen = ids([next(batches), next(batches)])
    (second,) = resumed(lambda: DataLoader(Numbers(20), batch_size=5, shuffle=True), first.state_dict(), 1)
    assert sorted(seen + ids(second)) == list(range(20))


def test_a_pass_that_was_broken_off_is_over():
    (loader,) = boosted(lambda: DataLoader(Numbers(12), batch_size=2, shuffle=True), 1)
    first = next(iter(loader))
    assert loader.state_dict()["samples"] == 2
    again = ids(loader)
    assert sorted(again) == list(range(12))
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert next(iter(loader))["id"].tolist() == first["id"].tolist()
    loader.set_epoch(0)
    assert loader.state_dict()["samples"] == 0


def test_set_epoch_keeps_the_loaded_place_of_that_epoch():
    def make():
        return DataLoader(Numbers(12), batch_size=4, shuffle=True)

    (loader,) = boosted(make, 1)
    order = [ids(loader), ids(loader)]
    loader.set_epoch(1)
    next(iter(loader))
    state = loader.state_dict()
    (second,) = resumed(make, state, 1)
    second.set_epoch(1)
    assert ids(second) == order[1][4:]
    (third,) = resumed(make, state, 1)
    third.set_epoch(0)
    assert ids(third) == order[0]


def test_two_passes_at_once_do_not_mix_their_places():
    (loader,) = boosted(lambda: DataLoader(Numbers(12), batch_size=4), 1)
    old, new = iter(loader), iter(loader)
    next(old), next(old), next(new)
    assert loader.state_dict()["samples"] == 4


def test_a_place_of_another_data_set_is_refused():
    (loader,) = boosted(lambda: DataLoader(Numbers(12), batch_size=4), 1)
    next(iter(loader))
    with pytest.raises(ConfigError, match="12 samples, and this one has 13"):
        resumed(lambda: DataLoader(Numbers(13), batch_size=4), loader.state_dict(), 1)
    with pytest.raises(ConfigError, match="lacks 'samples'"):
        loader.load_state_dict({"epoch": 1, "seed": 0, "batches": 0})


def test_a_sampler_with_a_generator_resumes_and_a_hidden_state_is_refused():
    def seeded():
        sampler = SubsetRandomSampler(range(12), generator=torch.Generator().manual_seed(3))
        return DataLoader(Numbers(12), batch_size=4, sampler=sampler)

    class Hidden(list):
        turn = random.Random(5)

        def __iter__(self):
            return iter(self.turn.sample(range(12), 12))

    def hidden():
        return DataLoader(Numbers(12), batch_size=4, sampler=Hidden([0] * 12))

    (loader,) = boosted(seeded, 1)
    list(loader)  # a pass behind us changes nothing
    seen = ids([next(iter(loader))])
    (second,) = resumed(seeded, loader.state_dict(), 1)
    assert sorted(seen + ids(second)) == list(range(12))

    (loader,) = boosted(hidden, 1)
    next(iter(loader))
    (second,) = resumed(hidden, loader.state_dict(), 1)
    with pytest.raises(ConfigError, match="another order"):
        list(second)


# ------------------------------------------------------------------------------------------------ randomness


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_follows_the_sample_and_leaves_the_program_alone(workers):
    def noise(ranks):
        loaders = boosted(lambda: DataLoader(Numbers(10), batch_size=5, shuffle=True, num_workers=workers), ranks)
        return [value for parts in zip(*loaders) for part in parts for value in part["noise"].tolist()]

    reference = noise(1)
    assert len(set(reference)) == 10
    torch.manual_seed(11)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert noise(3) == reference
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]


# ------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("kind", ["data set", "list", "generator"])
def test_streams_are_cut_into_rows(kind):
    makers = {
        "data set": lambda: DataLoader(Stream(7), batch_size=3),
        "list": lambda: [torch.arange(0, 3), torch.arange(3, 6), torch.arange(6, 7)],
        "generator": lambda: (torch.arange(start, min(start + 3, 7)) for start in (0, 3, 6)),
    }
    loaders = boosted(makers[kind], 2)
    found = [[part.tolist() for part in parts] for parts in zip(*loaders, strict=True)]
    assert found == [[[0, 1], [2]], [[3, 4], [5]], [[6], []]]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_streams_resume_by_reading_again(workers):
    def make():
        return DataLoader(Stream(17), batch_size=2, num_workers=workers)

    whole = [batch.tolist() for batch in make()]
    (loader,) = boosted(make, 1)
    batches = iter(loader)
    next(batches), next(batches), next(batches)
    (second,) = resumed(make, loader.state_dict(), 1)
    assert [batch.tolist() for batch in second] == whole[3:]


def test_workers_that_would_repeat_a_stream_are_refused():
    (loader,) = boosted(lambda: DataLoader(Stream(7, shares=False), batch_size=2, num_workers=2), 1)
    with pytest.raises(ConfigError, match="2 workers yield each sample 2 times"):
        list(loader)
    (loader,) = boosted(lambda: DataLoader(Stream(7, shares=False), batch_size=2, num_workers=1), 1)
    assert sum(len(batch) for batch in loader) == 7


def test_worker_init_sees_the_data_set_of_the_person():
    class Opened(Numbers):
        def __getitem__(self, index):
            return {"id": index, "handle": self.handle}

    def opens(worker):
        get_worker_info().dataset.handle = 100 + worker

    loader = boost_loader(DataLoader(Opened(4), batch_size=2, num_workers=2, worker_init_fn=opens), axis=ALONE)
    assert [batch["handle"].tolist() for batch in loader] == [[100, 100], [101, 101]]


def test_persistent_workers_read_every_pass():
    loader = boost_loader(
        DataLoader(Numbers(9), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=3), axis=ALONE
    )
    plain = boost_loader(DataLoader(Numbers(9), batch_size=2, shuffle=True), axis=ALONE)
    for _ in range(3):
        assert [batch["id"].tolist() for batch in loader] == [batch["id"].tolist() for batch in plain]


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(Numbers(0), batch_size=2), "the data set is empty"),
        (lambda: DataLoader(Numbers(3), batch_size=4, drop_last=True), "no batch of 4 from 3 samples.*batch_size=3"),
        (lambda: DataLoader(Numbers(3), batch_size=None), "batch_size=None"),
        (lambda: DataLoader(Numbers(3), batch_size=1, num_workers=1, in_order=False), "in_order=True"),
        (lambda: DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), 2, 0)), "shares the data out over 2 ranks"),
        (lambda: 3, "type int cannot be iterated"),
        (lambda: boost_loader([1], axis=ALONE), "boosted already"),
    ],
)
def test_what_cannot_be_exact_is_refused_at_once(make, message):
    with pytest.raises(ConfigError, match=message):
        boost_loader(make(), axis=ALONE)


@pytest.mark.parametrize(
    "make", [lambda: [], lambda: iter(()), lambda: DataLoader(Stream(0)), lambda: DataLoader(Numbers(3), batch_sampler=[])]
)
def test_an_empty_pass_is_refused(make):
    with pytest.raises(ConfigError, match=r"no batch|no sample"):
        list(boost_loader(make(), axis=ALONE))
