"""What a recipe builds: config, model and optimizer; and how a model is judged."""

import math

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from phalanx.data.windows import TokenWindows
from phalanx.errors import ConfigError
from phalanx.materialize import is_lazy, materialize
from phalanx.train.evaluate import plain_loss, score
from phalanx.train.memory import activation_bytes_of_a_row, chunk_sizes
from phalanx.train.model import build_config, build_hollow, build_model, build_optimizer
from phalanx.train.recipe import ModelSettings, OptimizerSettings

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny_config(**others):
    return build_config(ModelSettings(config=TINY | others), vocabulary=50, end_token=0)


def tiny(seed=0):
    return materialize(build_model(tiny_config(), seed))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ModelSettings(type="lama"), "'lama' is no language model of transformers. Try: llama."),
        (ModelSettings(type="vit"), "'vit' is no language model"),
        (ModelSettings(config={"hiden_size": 3}), "the config of llama has no field 'hiden_size'. Try: hidden_size."),
    ],
)
def test_what_transformers_does_not_have_is_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        build_config(settings, vocabulary=50, end_token=0)
    assert message in str(caught.value)


def test_the_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first, state = tiny(), torch.get_rng_state()
    torch.manual_seed(6)
    second, other = tiny(), tiny(seed=1)
    weights = [model.lm_head.weight for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_weights_are_those_of_transformers_and_take_no_memory_at_first():
    assert is_lazy(build_model(tiny_config(), 3))
    torch.manual_seed(3)
    eager, built = AutoModelForCausalLM.from_config(tiny_config()).state_dict(), tiny(seed=3).state_dict()
    assert all(torch.equal(eager[name], built[name]) for name in eager)
    assert eager.keys() == built.keys()


@pytest.mark.parametrize("tied", [True, False])
def test_a_hollow_model_runs_as_the_real_one_does(tied):
    real, hollow = (
        AutoModelForCausalLM.from_config(tiny_config(tie_word_embeddings=tied)),
        build_hollow(tiny_config(tie_word_embeddings=tied)),
    )
    assert {parameter.untyped_storage().nbytes() for parameter in hollow.parameters()} == {4}
    assert chunk_sizes(hollow) == chunk_sizes(real)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    found = [activation_bytes_of_a_row(model, {"input_ids": tokens, "labels": tokens}) for model in (real, hollow)]
    assert found[0] == found[1] > 16 * 50 * 4


def test_vectors_are_not_decayed_and_nothing_is_left_out():
    model = tiny()
    matrices, vectors = build_optimizer(model, OptimizerSettings(weight_decay=0.3)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert {parameter.ndim for parameter in matrices["params"]} == {2}
    assert {parameter.ndim for parameter in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_each_token_is_judged_once_whatever_the_batch(rows):
    model = tiny().eval()
    tokens = torch.randint(50, (41,), generator=torch.Generator().manual_seed(0))
    found = score(plain_loss(model), DataLoader(TokenWindows(tokens, 6), batch_size=rows), text_bytes=80)
    assert found.tokens == 40
    with torch.no_grad():
        windows = [tokens[start : start + 6] for start in range(0, 40, 5)]
        expected = sum(float(model(input_ids=window[None], labels=window[None]).loss) * 5 for window in windows)
    assert found.nats == pytest.approx(expected, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / 80, rel=1e-5)
