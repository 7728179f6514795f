"""What runs inside training beside plain steps: generation, evaluation, recompute, compiled layers, lazy construction."""

import time

import pytest
import torch
from booster_programs import STAGES, TOLERANCE, batch, boost, criterion, decoder, local, plain_step, replicas_differ, sgd, weights, worst
from patience import patience

import phalanx as px
from phalanx.errors import CommError, ConfigError
from phalanx.memory import partition
from phalanx.testing import RankError, run_ranks


def llama(layers=2, **options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, **options}
    config = LlamaConfig(vocab_size=37, max_position_embeddings=64, num_hidden_layers=layers, pad_token_id=0, eos_token_id=None, **sizes)
    return LlamaForCausalLM(config)


def words_and_labels(step):
    full = batch(step)
    return {"input_ids": full["words"], "labels": full["labels"]}


def generating(plan, streamed):
    """Generates other lengths on each rank between steps and between forward and backward; the training is that without."""
    partition.STREAMED_ELEMENTS = streamed
    outcome = []
    for generates in (False, True):
        model = llama()
        booster = px.Booster(plan)
        model, _optimizer, *_ = booster.boost(model, sgd(model))
        told, full = [], {}
        for step in range(3):
            rows = local(words_and_labels(step))
            if generates:
                new = 3 + 2 * booster.world.rank
                prompt = torch.tensor([[1, 2, 3]])
                found = model.generate(prompt, max_new_tokens=new, do_sample=False)
                assert found.shape == (1, 3 + new)
                if step == 1:  # what was generated is what the weights of this moment say
                    plain = llama()
                    plain.load_state_dict(full)
                    assert torch.equal(plain.generate(prompt, max_new_tokens=new, do_sample=False), found)
            told.append(booster.step(rows).loss)
            full = booster.full_state_dict()
        engine = booster.trainings[0].engine
        assert not [chunk.name for chunk in engine.chunks if chunk.policy.parameter and chunk.is_gathered]
        outcome.append((told, full))
    (losses, full), (same_losses, same) = outcome
    return losses == same_losses and all(torch.equal(full[name], same[name]) for name in full)


@pytest.mark.parametrize(("plan", "world", "streamed"), [("zero0", 2, 1), ("zero2", 2, 1), ("zero3", 3, 1), ("zero3", 2, 1 << 16)])
def test_generation_inside_training(plan, world, streamed):
    assert run_ranks(generating, world, plan, streamed) == [True] * world


def evaluating(plan):
    """Evaluation of ragged batches counts each label once, draws no random number, and leaves mode and training as they were."""
    model, reference = decoder(dropout=0.3, layers=2), decoder(dropout=0.3, layers=2).eval()
    booster, model, _optimizer = boost(plan, model, sgd(model))
    other = decoder(dropout=0.3, layers=2)
    other_booster, other, _other_optimizer = boost(plan, other, sgd(other))
    errors = []
    for rows in (8, 3, 1):
        full = batch(rows, rows)
        loss, count = criterion(reference(full["words"]), full)
        result = booster.evaluate(local(full))
        errors.append(abs(result.loss / (loss / count).item() - 1) + (result.tokens != count))
        assert model.training
    for step in range(2):
        booster.step(local(batch(step)))
        booster.evaluate(local(batch(step)))
        other_booster.step(local(batch(step)))
    full, expected = booster.full_state_dict(), other_booster.full_state_dict()
    return max(errors), all(torch.equal(full[name], expected[name]) for name in full)


@pytest.mark.parametrize(("plan", "world"), [("zero0+acc2", 2), ("zero2", 3), ("zero3", 2), ("zero3:2", 4)])
def test_evaluation(plan, world):
    for error, same in run_ranks(evaluating, world, plan):
        assert error < TOLERANCE
        assert same


# -- recompute ---------------------------------------------------------------------------------------------------------


def with_dropout(plan):
    """Losses, gradients of the first step and weights after three, with dropout on."""
    model = decoder(dropout=0.3, tied=True)
    booster, model, optimizer = boost(plan, model, sgd(model, momentum=0.9), seed=3)
    booster.forward_backward(local(batch(0)))
    gradients = booster.gradients()
    losses = [optimizer.step().loss] + [booster.step(local(batch(step))).loss for step in range(1, 3)]
    return losses, gradients, booster.full_state_dict()


def recomputing(stage):
    """Whether each kind of recompute gives the numbers of none, bit for bit."""
    losses, gradients, full = with_dropout(stage)
    same = {}
    for kind in ("recompute", "recompute=0.5", "selective"):
        other_losses, other_gradients, other = with_dropout(f"{stage}+{kind}")
        same[kind] = (
            losses == other_losses
            and all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)
            and all(torch.equal(full[name], other[name]) for name in full)
        )
    drawn = px.Booster(stage, seed=4)
    model = decoder(dropout=0.3, tied=True)
    drawn.boost(model, sgd(model), criterion)
    same["another seed"] = drawn.step(local(batch(0))).loss != losses[0]
    return same


@pytest.mark.parametrize(("stage", "world"), [("zero0", 1), ("zero0+acc2", 2), ("zero2", 2), ("zero3", 2), ("zero3", 3)])
def test_recompute_changes_no_bit(stage, world):
    for same in run_ranks(recomputing, world, stage):
        assert all(same.values()), same


def recomputing_with_lost_random_state(stage):
    import phalanx.parallel.recompute as recompute

    kept = recompute.checkpoint
    recompute.checkpoint = lambda *args, **kwargs: kept(*args, **{**kwargs, "preserve_rng_state": False})
    return recomputing(stage)


def test_recompute_that_draws_anew_is_found():
    assert not any(run_ranks(recomputing_with_lost_random_state, 2, "zero0")[0][kind] for kind in ("recompute", "recompute=0.5"))


# -- compiled layers ---------------------------------------------------------------------------------------------------


def compiled(plan, way):
    """Worst error of gradients and weights over two steps where each layer is compiled."""
    reference, model = decoder(layers=2), decoder(layers=2)
    if way == "method":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    else:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="aot_eager")
    plain = sgd(reference)
    booster, model, optimizer = boost(plan, model, sgd(model))
    error = 0.0
    for step in range(2):
        _, expected = plain_step(reference, plain, [batch(step)])
        booster.forward_backward(local(batch(step)))
        error = max(error, worst(booster.gradients(), expected))
        optimizer.step()
    return max(error, worst(booster.full_state_dict(), weights(reference)))


@pytest.mark.parametrize("way", ["method", "function"])
@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_compiled_layers(plan, way):
    assert max(run_ranks(compiled, 2, plan, way)) < TOLERANCE


# -- lazy construction -------------------------------------------------------------------------------------------------


def lazy(plan):
    """A model built without memory trains like the eager one, bit for bit; its buffers and ties are there."""
    outcome = []
    for is_lazy in (False, True):
        torch.manual_seed(0)
        if is_lazy:
            with px.lazy():
                model = llama(tie_word_embeddings=True)
            assert all(parameter.device.type == "meta" or parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters())
        else:
            model = llama(tie_word_embeddings=True)
        booster = px.Booster(plan)
        model, _optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        start = booster.full_state_dict()
        losses = [booster.step(local(words_and_labels(step))).loss for step in range(2)]
        outcome.append((losses, start, booster.full_state_dict()))
    (losses, start, full), (lazy_losses, lazy_start, lazy_full) = outcome
    assert set(start) == set(lazy_start)
    assert not replicas_differ(lazy_full)
    return losses == lazy_losses and all(
        torch.equal(start[name], lazy_start[name]) and torch.equal(full[name], lazy_full[name]) for name in full
    )


@pytest.mark.parametrize("plan", [*STAGES, "zero1+bf16", "zero3+bf16"])
def test_models_built_without_memory(plan):
    assert run_ranks(lazy, 2, plan) == [True] * 2


# -- agreement ---------------------------------------------------------------------------------------------------------


def second_model_leaves_the_order():
    """Two sharded models; in the second one, ranks run different modules."""
    first, second = decoder(0), decoder(1)
    booster = px.Booster("zero3")
    first, *_ = booster.boost(first, sgd(first), criterion)
    second, _second_optimizer, *_ = booster.boost(second, sgd(second), criterion)
    for step in range(2):
        booster.step(local(batch(step)), first)
    if booster.world.rank == 1:
        second.blocks[1].forward = lambda x: x + second.blocks[0](x)
    start = time.monotonic()
    try:
        booster.step(local(batch()), second)
    except CommError as error:
        return str(error), time.monotonic() - start


def test_disagreement_in_a_second_model_is_named():
    try:
        outcomes = run_ranks(second_model_leaves_the_order, 2)
    except RankError as failure:
        outcomes = [(str(failure), 0.0)]
    for message, seconds in outcomes:
        assert "blocks" in message
        assert seconds < patience(20)


def state_dict_of(plan):
    model = decoder()
    booster, model, _ = boost(plan, model, sgd(model))
    with booster.gathered():
        inside = {name: value.clone() for name, value in model.state_dict().items()}
    same = all(torch.equal(value, inside[name]) for name, value in booster.full_state_dict().items())
    try:
        model.state_dict()
    except ConfigError as error:
        return same, str(error)
    return same, ""


def test_a_state_dict_of_placeholders_is_refused():
    for same, message in run_ranks(state_dict_of, 2, "zero3"):
        assert same
        assert "booster.full_state_dict()" in message
    assert run_ranks(state_dict_of, 2, "zero2") == [(True, "")] * 2
