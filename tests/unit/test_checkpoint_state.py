"""Nested values come back as they were, or are refused by name; nothing is pickled."""

import math
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from checkpoint_cases import ALONE

from phalanx.checkpoint import load, save
from phalanx.errors import CheckpointError


def equal(left, right) -> bool:
    """Equality of values, types and order, tensors bit for bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return all(equal(a, b) for a, b in zip(left.items(), right.items(), strict=True))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right))
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


VALUES = {
    "scalars": [None, True, False, 0, -1, 1 << 80, 0.1, -0.0, 1e-320, float("inf"), float("-inf"), float("nan"), "", "ü\n\ud800"],
    "containers": [[], (), {}, ((1, 2), [3, (4,)]), {"a": {"b": ()}}, {1: "int", 1.5: "float", None: 0, (1, 2): [], False: 1}],
    "tagged": {"$": "dict", "items": []},
    "order": {"z": 1, "a": 2},
    "bytes": [b"", bytes(range(256))],
    "kinds": [OrderedDict(b=1, a=2), Counter({3: 2, 10: 1}), torch.Size([2, 3]), torch.bfloat16],
    "tensors": {
        0: torch.arange(5),
        "half": [torch.ones(2, 3).bfloat16(), torch.tensor(True), torch.zeros(0, 2)],
        "t": torch.arange(6.0).reshape(2, 3).T,
    },
}


def test_values_come_back_exactly(tmp_path):
    save(tmp_path / "at", [], VALUES, {"rng": torch.get_rng_state(), "own": (1,)}, ALONE)
    state, local_state = load(tmp_path / "at", [], ALONE)
    assert equal(state, VALUES)
    assert equal(local_state, {"rng": torch.get_rng_state(), "own": (1,)})
    assert not equal(state, {**VALUES, "order": {"a": 2, "z": 1}})


def test_states_of_torch_optimizers_and_schedulers_come_back(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    weight.sum().backward()
    optimizer.step()
    scheduler.step()
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    save(tmp_path / "at", [], state, {}, ALONE)
    assert equal(load(tmp_path / "at", [], ALONE)[0], state)


Point = namedtuple("Point", "x y")
RECURSIVE: list = []
RECURSIVE.append(RECURSIVE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2: object()}]}, r"state\['a'\]\[1\]\[2\] is a builtins.object"),
        ({"a": np.float32(1)}, r"state\['a'\] is a numpy.float32.*value.item\(\)"),
        ({"a": {1, 2}}, r"state\['a'\] is a builtins.set"),
        ({"a": Point(1, 2)}, r"state\['a'\] is a .*Point"),
        ({"a": lambda: None}, r"state\['a'\] is a builtins.function"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, r"state\['a'\] has dtype torch.complex128"),
        ({"a": torch.zeros(1, device="meta")}, r"state\['a'\] is not a plain tensor with data \(meta"),
        ({"a": torch.eye(2).to_sparse()}, r"state\['a'\] is not a plain tensor with data"),
        ({"a": RECURSIVE}, r"state contains itself"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(tmp_path, value, message):
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "at", [], value, {}, ALONE)
    assert not list(tmp_path.iterdir())
