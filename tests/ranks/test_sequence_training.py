"""Training on parts of sequences: what is sent, what dropout draws, what evaluation says, and what is left of the model afterwards."""

from __future__ import annotations

import pytest
import torch

import phalanx as px
from phalanx.cluster import comm, launch
from phalanx.errors import PlanError
from phalanx.testing import RankError, run_ranks
from tests.numerics import sequence_programs as programs

ROWS, LENGTH = 2, 24


def _llama(dropout: float = 0.0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=37, attention_dropout=dropout, **sizes)).double()


def _batch(step: int = 0) -> dict[str, torch.Tensor]:
    ids = programs.draw(step, ROWS, LENGTH)
    return {"input_ids": ids, "labels": ids}


def _boosted(plan: str, model: torch.nn.Module, seed: int = 0):
    booster = px.Booster(plan, seed=seed)
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


def _bytes_of_a_step(plan: str) -> dict[str, int]:
    booster, *_ = _boosted(plan, _llama())
    booster.step(_batch())
    with comm.ledger.record() as rows:
        booster.step(_batch(1))
    wire: dict[str, int] = {}
    for operation, axis, _, _, sent in rows:
        if operation == "all_to_all":
            wire[axis] = wire.get(axis, 0) + sent
    return wire


@pytest.mark.parametrize("plan", ["recompute+ring2", "selective+ring2"])
def test_a_ring_is_not_run_twice_where_a_block_is(plan):
    """Three layers, forward once and backward twice k and v: (r - 1) 2 b s h_kv / r elements."""
    once = ROWS * LENGTH * 2 * 16 // 2 * 8
    for wire in run_ranks(_bytes_of_a_step, 2, plan):
        assert wire == {"ring": 3 * 3 * once}


def _gradients_with_dropout(plan: str, seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    booster, *_ = _boosted(plan, _llama(dropout=0.3), seed)
    result = booster.forward_backward(_batch())
    return result.loss, booster.gradients()


def test_recompute_draws_the_same_dropout():
    plain, recomputed, other = (run_ranks(_gradients_with_dropout, 2, *given) for given in (("ring2",), ("recompute+ring2",), ("ring2", 1)))
    for (loss, gradients), (again_loss, again) in zip(plain, recomputed, strict=True):
        assert loss == again_loss
        assert all(torch.equal(gradients[name], again[name]) for name in gradients)
    assert other[0][0] != plain[0][0]


def _evaluation() -> tuple[float, float, float, str]:
    """Loss of an evaluation on parts and in one process, and what the model says and is outside of steps."""
    model = _llama()
    with torch.no_grad():
        whole = model.eval()(**_batch())
    model.train()
    booster, boosted, _ = _boosted("zero3+ring2", model)
    found = booster.evaluate(_batch()).loss
    with torch.no_grad(), booster.gathered():
        after = boosted.eval()(**_batch())
    return float(whole.loss), found, float((whole.logits - after.logits).abs().max()), boosted.config._attn_implementation


def test_evaluation_is_cut_and_the_model_is_itself_outside_of_steps():
    for whole, found, difference, implementation in run_ranks(_evaluation, 2):
        assert abs(whole - found) < 1e-6  # in float32 inside the model
        assert difference < 1e-12
        assert implementation == "sdpa"


def _evaluation_of_documents(plan: str) -> tuple[float, float]:
    batch = programs.packed_batch(0)
    del batch["use_cache"]
    model = _llama()
    with torch.no_grad():
        expected = float(model.eval()(**batch, use_cache=False).loss)
    booster, *_ = _boosted(plan, model)
    return expected, booster.evaluate(batch).loss


@pytest.mark.parametrize("plan", ["zero0", "ring2"])
def test_documents_are_apart_in_an_evaluation_too(plan):
    """A cache, which models keep where nobody forbids it, would hide their borders."""
    for expected, found in run_ranks(_evaluation_of_documents, 1 if plan == "zero0" else 2, plan):
        assert abs(expected - found) < 1e-6


def _another_kind_of_batch() -> None:
    booster, *_ = _boosted("ring2", programs.encoder_decoder().double())
    plain = programs.two_texts(0)
    booster.step(plain)
    booster.step({**plain, "attention_mask": torch.ones_like(plain["input_ids"])})


def test_a_batch_of_another_kind_is_tried_out_as_well():
    with pytest.raises(RankError, match=r"decoder.* mixes tokens"):
        run_ranks(_another_kind_of_batch, 2)


def _tried_again() -> None:
    booster, model = px.Booster("ring2"), programs.Transformer("pooled").double()
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), programs.sum_and_count)
    with pytest.raises(PlanError, match="mixes tokens"):
        booster.step(programs.own_batch(0))
    booster.step(programs.own_batch(1))


def test_a_refusal_stands_when_a_step_is_tried_again():
    with pytest.raises(RankError, match="mixes tokens"):
        run_ranks(_tried_again, 2)


def _losses_of_lengths(plan: str, lengths: list[tuple[int, int]]) -> list[float]:
    """Steps on two times `ROWS` rows of two lengths, which one process sees filled up and data ranks as they are."""
    torch.manual_seed(0)
    booster, model, losses = px.Booster(plan), programs.Transformer().double(), []
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), programs.sum_and_count)
    for step, pair in enumerate(lengths):
        parts = [[tensor[:, :length] for tensor in programs.own_batch(2 * step + half)] for half, length in enumerate(pair)]
        if plan == "zero0":
            fill = lambda tensor, value: torch.nn.functional.pad(tensor, (0, max(pair) - tensor.shape[1]), value=value)  # noqa: E731, B023
            batch = torch.cat([fill(ids, 0) for ids, _ in parts]), torch.cat([fill(labels, -100) for _, labels in parts])
        else:
            batch = tuple(parts[launch.world().rank // 2])
        losses.append(booster.step(batch).loss)
    return losses


@pytest.mark.parametrize("lengths", [[(13, 13), (3, 13)], [(3, 13), (13, 3)]])
def test_rows_of_data_ranks_may_have_other_lengths(lengths):
    """Short rows prove little, but what one data rank has to try out all have."""
    expected = run_ranks(_losses_of_lengths, 1, "zero0", lengths)[0]
    for losses in run_ranks(_losses_of_lengths, 4, "dp2+ring2", lengths):
        assert losses == pytest.approx(expected, rel=1e-12)


def _hand_written() -> None:
    booster, model, optimizer = _boosted("ring2", _llama())
    booster.backward(model(**_batch()).loss, optimizer)


def test_a_hand_written_forward_is_refused():
    with pytest.raises(RankError, match="hand-written forward"):
        run_ranks(_hand_written, 2)


def _long_rope() -> None:
    model = _llama()
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model.config.max_position_embeddings = LENGTH - 1
    booster, *_ = _boosted("ring2", model)
    booster.step(_batch())


def test_frequencies_that_depend_on_the_length_are_refused():
    with pytest.raises(RankError, match="positions depend on the length"):
        run_ranks(_long_rope, 2)


def _generation(plan: str) -> tuple[bool, bool]:
    """Between two steps on parts of rows: whether it says what the same weights say in one process, and what those before the step did."""
    model, prompt = _llama(), programs.draw(5, ROWS, 7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # so that a step changes what is said
    says = lambda model: model.eval().generate(input_ids=prompt, max_new_tokens=5, do_sample=False)  # noqa: E731
    before, alone = says(model), _llama()
    booster, boosted, _ = _boosted(plan, model.train())
    booster.step(_batch())
    alone.load_state_dict(booster.full_state_dict())
    with booster.gathered():
        found = says(boosted)
    booster.step(_batch(1))
    return torch.equal(found, says(alone)), torch.equal(found, before)


def test_a_model_generates_whole_rows_between_steps_on_parts():
    for is_right, is_stale in run_ranks(_generation, 2, "zero3+ring2"):
        assert is_right
        assert not is_stale


def _losses_of_two_models(plan: str) -> list[float]:
    """One of transformers on packed rows and one of another kind, which finds its positions itself, in turn."""
    booster, losses = px.Booster(plan), []
    torch.manual_seed(0)
    first, second = _llama(), programs.Transformer().double()
    first, first_optimizer, *_ = booster.boost(first, torch.optim.SGD(first.parameters(), lr=0.1))
    second, second_optimizer, *_ = booster.boost(second, torch.optim.SGD(second.parameters(), lr=0.1), programs.sum_and_count)
    for step in range(3):
        losses.append(booster.forward_backward(programs.packed_batch(step), model=first).loss)
        losses.append(booster.forward_backward(programs.own_batch(step), model=second).loss)
        first_optimizer.step()
        second_optimizer.step()
    return losses


def test_two_models_take_turns_on_parts():
    expected = run_ranks(_losses_of_two_models, 1, "zero0")[0]
    for losses in run_ranks(_losses_of_two_models, 2, "ring2"):
        assert losses == pytest.approx(expected, rel=1e-12)


def _mean_over_everything(length: int, counts: bool) -> None:
    def criterion(values: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((values - batch["wanted"]) ** 2).mean()

    booster, model = px.Booster("ring2", count=(lambda batch: batch["wanted"].numel()) if counts else None), programs.Values().double()
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion)
    booster.step({"ids": programs.draw(0, ROWS, length), "wanted": torch.ones(ROWS, length, dtype=torch.float64)})


@pytest.mark.parametrize(("length", "counts"), [(20, True), (4, True), (LENGTH, False)])
def test_a_mean_over_every_element_is_refused(length, counts):
    """Also where this batch's length divides: that of the next one may not."""
    with pytest.raises(RankError, match=r"every element counts what fills them.*\(loss_sum, count\) of the tokens that count"):
        run_ranks(_mean_over_everything, 2, length, counts)
