"""What is refused around saving: another optimizer's checkpoint, another call's, and a call on the first rank alone."""

import time
from pathlib import Path

import pytest
import torch
from booster_programs import batch, boost, decoder, local
from patience import patience

from phalanx.checkpoint import agree
from phalanx.cluster import comm
from phalanx.errors import CheckpointError, CommError, ConfigError
from phalanx.testing import run_ranks


def program(plan="zero1", make=torch.optim.AdamW, groups=None, steps=0):
    """A booster and its optimizer, whose `groups` (numbers of parameters, from the first on) are one of all where not given."""
    model = decoder(dtype=torch.float32, layers=2)
    parameters, cut = list(model.parameters()), []
    for size in groups or [len(parameters)]:
        cut.append({"params": parameters[:size]})
        parameters = parameters[size:]
    booster, _, optimizer = boost(plan, model, make(cut, lr=1e-2))
    for step in range(steps):
        booster.step(local(batch(step)))
    return booster, optimizer


def whole():
    return len(list(decoder(layers=2).parameters()))


class AdamW(torch.optim.AdamW):
    """The same class as far as anyone can tell by its name."""


def swapped(groups, lr):
    """AdamW whose first two parameters change places."""
    first, *others = groups
    return torch.optim.AdamW([{"params": [*first["params"][1::-1], *first["params"][2:]]}, *others], lr=lr)


def refusal(call):
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


def into_other(booster, optimizer, folder):
    """The messages of both ways of loading what does not fit; no moment has changed after them."""
    before = [value.clone() for entry in optimizer.state.values() for value in entry.values()]
    told = [
        refusal(lambda: booster.load(f"{folder}/run")),
        refusal(lambda: booster.load_optimizer(optimizer, f"{folder}/optimizer")),
    ]
    after = [value for entry in optimizer.state.values() for value in entry.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return told


def into_others(folder):
    halves = [2, whole() - 2]
    booster, optimizer = program(groups=halves, steps=1)
    booster.save(f"{folder}/run")
    booster.save_optimizer(optimizer, f"{folder}/optimizer")
    others = {"kind": (torch.optim.SGD, halves), "count": (torch.optim.AdamW, [whole()]), "names": (swapped, halves)}
    told = {what: into_other(*program("zero1", make, groups, steps=1), folder) for what, (make, groups) in others.items()}
    booster, optimizer = program(make=AdamW, groups=halves)
    booster.load(f"{folder}/run")
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    return told


def test_another_optimizers_checkpoint_is_refused_and_both_are_named(tmp_path):
    halves = [2, whole() - 2]
    for told in run_ranks(into_others, 2, str(tmp_path)):
        for message in told["kind"]:
            assert f"AdamW with 2 groups of {halves} parameters, this run has SGD with 2 groups of {halves}" in message
        for message in told["count"]:
            assert f"AdamW with 2 groups of {halves} parameters, this run has AdamW with 1 groups of [{whole()}]" in message
        for message in told["names"]:
            assert "where blocks.0.norm.weight is in place of embed.weight" in message


def through_the_wrong_call(folder):
    booster, optimizer = program(steps=1)
    booster.save(f"{folder}/run")
    booster.save_optimizer(optimizer, f"{folder}/optimizer")
    return refusal(lambda: booster.load(f"{folder}/optimizer")), refusal(lambda: booster.load_optimizer(optimizer, f"{folder}/run"))


def test_what_another_call_wrote_is_refused(tmp_path):
    for run, optimizer in run_ranks(through_the_wrong_call, 2, str(tmp_path)):
        assert "holds no models but optimizer" in run
        assert "holds no optimizer but loaders, models, plan, step" in optimizer


# -- one rank alone ----------------------------------------------------------------------------------------------------

CALLS = {
    "booster.save": lambda booster, optimizer, folder: booster.save(f"{folder}/alone"),
    "booster.save_optimizer": lambda booster, optimizer, folder: booster.save_optimizer(optimizer, f"{folder}/alone"),
    "booster.save_model": lambda booster, optimizer, folder: booster.save_model(f"{folder}/alone"),
    "booster.load": lambda booster, optimizer, folder: booster.load(f"{folder}/run"),
    "booster.load_optimizer": lambda booster, optimizer, folder: booster.load_optimizer(optimizer, f"{folder}/optimizer"),
    "booster.load_model": lambda booster, optimizer, folder: booster.load_model(f"{folder}/model"),
}


def on_first_rank_alone(plan, call, folder):
    """The error of `if rank == 0: booster.save(path)` and a barrier, and the seconds until it came."""
    booster, optimizer = program(plan, steps=1)
    booster.save(f"{folder}/run")
    booster.save_optimizer(optimizer, f"{folder}/optimizer")
    booster.save_model(f"{folder}/model")
    agree.ALONE_S, begin = 1.0, time.monotonic()
    with pytest.raises(CommError) as caught:
        CALLS[call](booster, optimizer, folder) if booster.world.rank == 0 else comm.barrier(booster.mesh.world)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize(("plan", "call"), [("zero3", "booster.save"), *(("zero1", call) for call in CALLS)])
def test_a_call_on_the_first_rank_alone_is_told_on_all_ranks(tmp_path, plan, call):
    assert agree.ALONE_S <= 10
    for message, seconds in run_ranks(on_first_rank_alone, 2, plan, call, str(tmp_path), timeout_s=60):
        assert f"{call} must be called on all ranks" in message
        assert "test_booster_saving_refusals.py" in message
        assert seconds < patience(10)


def between_a_backward_and_its_step(folder):
    """What saving tells while gradients wait for their step; after the step it works."""
    booster, optimizer = program()
    booster.forward_backward(local(batch()))
    with pytest.raises(ConfigError) as caught:
        booster.save(f"{folder}/run")
    optimizer.step()
    booster.save(f"{folder}/run")
    return str(caught.value)


def test_a_save_that_would_lose_gradients_is_refused(tmp_path):
    assert all("between a backward and its step" in told for told in run_ranks(between_a_backward_and_its_step, 2, str(tmp_path)))


def from_a_damaged_checkpoint(folder):
    """Loads of a checkpoint with a flipped byte fail; weights and moments are those from before."""
    booster, optimizer = program(steps=2)
    booster.save(f"{folder}/run")
    if booster.world.rank == 0:
        file = max(Path(folder, "run").glob("*.safetensors"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[-3] ^= 255
        file.write_bytes(data)
    comm.barrier(booster.mesh.world)
    booster.step(local(batch(2)))
    state = lambda: [value.clone() for entry in optimizer.state.values() for value in entry.values()]  # noqa: E731
    moments, weights = state(), booster.full_state_dict()
    told = refusal(lambda: booster.load(f"{folder}/run"))
    assert all(torch.equal(a, b) for a, b in zip(moments, state(), strict=True))
    assert all(torch.equal(value, weights[name]) for name, value in booster.full_state_dict().items())
    return told


def test_a_load_that_fails_changes_nothing(tmp_path):
    assert all("damaged" in told or "checksum" in told for told in run_ranks(from_a_damaged_checkpoint, 2, str(tmp_path)))
