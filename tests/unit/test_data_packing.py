"""Packing and windows: no token lost, none predicted twice, none predicted across a border."""

import random
from collections import Counter
from itertools import pairwise

import numpy
import pytest
import torch
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.data import TokenWindows, cu_seqlens, pack, segment_mask
from phalanx.errors import ConfigError


def documents_of(seed: int) -> list[list[int]]:
    """Documents of distinct tokens, so that a token names its place; some are empty."""
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 1, 2, 3, 5, 8, 13, 40]) for _ in range(draw.randint(1, 12))] + [1]
    starts = numpy.cumsum([0, *sizes]) + 1000
    return [list(range(start, start + size)) for start, size in zip(starts[:-1].tolist(), sizes, strict=True)]


def predictions(row: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    """(context token, predicted token) pairs after the model's shift."""
    ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
    return [(ids[place - 1], labels[place]) for place in range(1, len(ids)) if labels[place] != -100]


@pytest.mark.parametrize("seed", range(30))
def test_pack_keeps_and_predicts_each_token_once(seed):
    documents, length = documents_of(seed), random.Random(seed).randint(2, 17)
    rows = list(pack(documents, length))
    assert all(value.shape == (length,) and value.dtype == torch.int64 for row in rows for value in row.values())
    kept = {token for row in rows for token in row["input_ids"].tolist()} - {0}
    assert kept == {token for document in documents for token in document}
    found = Counter(pair for row in rows for pair in predictions(row))
    wanted = Counter(pair for document in documents for pair in pairwise(document))
    assert found == wanted
    # Counting labels without the shift gives the same number: nothing hides at position 0.
    assert sum(int((row["labels"] != -100).sum()) for row in rows) == len(list(wanted.elements()))


@pytest.mark.parametrize("seed", range(10))
def test_pack_positions_and_borders_agree(seed):
    rows = list(pack(documents_of(seed), 9))
    for row in rows:
        starts = [0] + [at for at in range(1, 9) if row["document_ids"][at] != row["document_ids"][at - 1]]
        lengths = [stop - start for start, stop in zip(starts, [*starts[1:], 9], strict=True)]
        assert row["position_ids"].tolist() == [place for size in lengths for place in range(size)]
        assert cu_seqlens(row["document_ids"]).tolist() == [*starts, 9]
        assert all(row["labels"][start] == -100 for start in starts)
    batch = default_collate(rows)
    borders = cu_seqlens(batch["document_ids"])
    assert borders.dtype == torch.int32
    assert torch.equal(borders[:-1].long(), (batch["position_ids"].reshape(-1) == 0).nonzero().reshape(-1))


def test_pack_equals_separate_documents_in_a_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    model = LlamaForCausalLM(config).double()
    documents = [torch.randint(37, (size,)).tolist() for size in (5, 1, 3, 11, 2)]
    batch = default_collate(list(pack(documents, 12)))  # 22 tokens and no document cut but the 11

    @torch.no_grad()
    def loss_sum(input_ids, labels, **inputs):
        logits = model(input_ids=input_ids, use_cache=False, **inputs).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")

    segments = [(row, number) for row in range(len(batch["input_ids"])) for number in batch["document_ids"][row].unique()]
    alone = 0.0
    for row, number in segments:
        inside = batch["document_ids"][row] == number
        alone += float(loss_sum(batch["input_ids"][row][inside][None], batch["labels"][row][inside][None]))
    ids, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
    by_positions = float(loss_sum(ids, labels, position_ids=positions))
    by_mask = float(loss_sum(ids, labels, position_ids=positions, attention_mask=segment_mask(batch["document_ids"])))
    blind = float(loss_sum(ids, labels))
    assert by_positions == pytest.approx(alone, rel=1e-12)
    assert by_mask == pytest.approx(alone, rel=1e-12)
    assert abs(blind - alone) > 1e-6 * alone  # a model that sees across documents gives another number


def test_pack_streams_without_reading_ahead():
    read = []

    def endless():
        while True:
            read.append(1)
            yield [1, 2, 3]

    rows = pack(endless(), 4)
    next(rows)
    assert len(read) == 2


def test_pack_refuses_nothing_to_predict():
    with pytest.raises(ConfigError, match="at least 2"):
        list(pack([[1, 2]], 1))
    with pytest.raises(ConfigError, match="no token"):
        list(pack([[], []], 4))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_windows_predict_each_token_once(seed, shifted):
    draw = random.Random(seed)
    length = draw.randint(2, 9)
    tokens = torch.arange(1000, 1000 + draw.randint(length + 1, 60))
    windows = TokenWindows(tokens, length, shifted=shifted)
    items = [windows[index] for index in range(len(windows))]
    assert all(item["input_ids"].shape == item["labels"].shape == (length,) for item in items)
    pairs: Counter = Counter()
    for item in items:
        if shifted:
            pairs.update((i, t) for i, t in zip(item["input_ids"].tolist(), item["labels"].tolist()) if t != -100)
        else:
            pairs.update(predictions(item))
            assert item["labels"][0] == -100
    assert pairs == Counter((token, token + 1) for token in tokens.tolist()[:-1])


def test_windows_read_a_memory_map(tmp_path):
    path = tmp_path / "tokens.bin"
    numpy.arange(100, dtype=numpy.uint16).tofile(path)
    windows = TokenWindows(numpy.memmap(path, dtype=numpy.uint16, mode="r"), 10)
    assert windows[1]["input_ids"].tolist() == list(range(9, 19))
    assert windows[len(windows) - 1]["input_ids"].tolist() == list(range(90, 100))
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_windows_refuse_what_is_no_text():
    with pytest.raises(ConfigError, match=r"5 tokens do not fill a window of 8.*length=5"):
        TokenWindows(torch.arange(5), 8)
    assert len(TokenWindows(torch.arange(5), 5)) == 1  # what the message says works
    with pytest.raises(ConfigError, match="length=4"):
        TokenWindows(torch.arange(5), 8, shifted=True)
    assert len(TokenWindows(torch.arange(5), 4, shifted=True)) == 1
    with pytest.raises(ConfigError, match="longer text"):
        TokenWindows(torch.arange(0), 8)
    with pytest.raises(ConfigError, match="nothing to predict"):
        TokenWindows(torch.arange(5), 1)
    with pytest.raises(ConfigError, match="float32"):
        TokenWindows(torch.ones(20), 4)
    with pytest.raises(ConfigError, match=r"\(2, 5\)"):
        TokenWindows(torch.zeros(2, 5, dtype=torch.int64), 4)
