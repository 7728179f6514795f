"""Generation of a model that is cut into stages: every rank holds all of it for the while, and gets what one process does."""

import pytest
import torch
from booster_programs import batch, boost, decoder, sgd
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from phalanx.errors import ConfigError
from phalanx.parallel.pipeline.cut import Away
from phalanx.precision import lift_to_float64
from phalanx.testing import RankError, run_ranks

WAYS = (
    {"do_sample": False},
    {"do_sample": True, "top_k": 5},
    {"num_beams": 3, "do_sample": False},
    {"do_sample": False, "use_cache": False},
)


def language_model():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=24, n_head=4, vocab_size=53, n_positions=32, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, None, None
    model = GPT2LMHeadModel(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def tokens(rows=4):
    return torch.randint(0, 53, (rows, 9), generator=torch.Generator().manual_seed(3))


def generated(model):
    model.eval()
    found = []
    for options in WAYS:
        torch.manual_seed(7)
        found.append(model.generate(tokens(2), attention_mask=torch.ones(2, 9, dtype=torch.int64), max_new_tokens=6, **options))
    return found


def one_step(model, optimizer):
    with lift_to_float64():  # the model's own loss would be computed in float32
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()


def generate_between_steps(plan):
    """What a model generates after a step, that of another step afterwards, and what is left of the other stages' parameters."""
    model = language_model()
    booster, model, _ = boost(plan, model, sgd(model), None)
    rows = {"input_ids": tokens(), "labels": tokens()}
    booster.step(
        rows if booster.mesh.axis("dp").size == 1 else {name: value[booster.mesh.index("dp") :: 2] for name, value in rows.items()}
    )
    before = sum(parameter.numel() for parameter in model.parameters())
    found = generated(model)
    with booster.gathered(), torch.no_grad():
        logits = model(input_ids=tokens(), attention_mask=torch.ones_like(tokens())).logits
        with pytest.raises(ConfigError, match=r"inside booster\.gathered"):
            booster.evaluate(rows)
    model.train()
    loss = booster.evaluate(rows).loss
    return found, logits, loss, before == sum(parameter.numel() for parameter in model.parameters())


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("plan", "world"), [pytest.param("pp2", 2, marks=SLOW), ("zero3+pp2+zbv", 4), pytest.param("pp2+tp2", 4, marks=SLOW)]
)
def test_stages_generate_what_one_process_does(plan, world):
    model = language_model()
    one_step(model, sgd(model))
    expected = generated(model)
    logits = model(input_ids=tokens(), attention_mask=torch.ones_like(tokens())).logits
    with lift_to_float64():
        loss = model(input_ids=tokens(), labels=tokens()).loss
    assert len({tuple(rows.flatten().tolist()) for rows in expected}) > 1
    for found, whole, evaluated, is_cut_again in run_ranks(generate_between_steps, world, plan):
        assert all(torch.equal(one, other) for one, other in zip(found, expected))
        assert torch.allclose(whole, logits, rtol=1e-9, atol=1e-9)
        assert evaluated == pytest.approx(loss.item(), rel=1e-9)
        assert is_cut_again


def generate_without_lending(plan):
    """A fault on purpose: the other stages' parameters do not come."""
    Away.lend = lambda self, value: None
    return generate_between_steps(plan)[0]


def test_stages_without_the_others_parameters_cannot_generate():
    model = language_model()
    one_step(model, sgd(model))
    try:
        found = run_ranks(generate_without_lending, 2, "pp2")[0]
    except RankError:  # sampling refuses what is not a number
        return
    assert not torch.equal(found[0], generated(model)[0])


def step_inside():
    model = decoder()
    booster, *_ = boost("pp2", model, sgd(model))
    with booster.gathered(), pytest.raises(ConfigError, match=r"inside booster\.gathered"):
        booster.step(batch(1))
    return booster.step(batch(1)).loss > 0


def test_a_step_while_the_whole_model_is_here_is_refused():
    assert run_ranks(step_inside, 2) == [True, True]
