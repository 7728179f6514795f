"""What can be verified: built-in names, directories, functions of files; their batches, and their start weights."""

import json
import sys

import pytest
import torch
import transformers
from torch import nn

from phalanx.errors import ConfigError
from phalanx.verify import NAMES, tiny
from phalanx.verify.batches import LENGTHS, make_batch
from phalanx.verify.program import FileFunction, Functions, NamedModel, disable_dropout, find_source
from phalanx.verify.reference import Run, norm_of, plain_loss, reference, start_program
from phalanx.verify.trace import digests

USER_FILE = """
import torch
from torch import nn

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)
        self.first = nn.Linear(3, 3)

    def forward(self, inputs):
        return self.layer(self.layer(self.first(inputs)))

def mean_square(output, target):
    return ((output - target) ** 2).sum(), output.shape[0]

def whole():
    return Twice(), mean_square, (torch.ones(5, 3), torch.zeros(5, 3))

def by_step():
    return Twice(), mean_square, lambda step: (torch.full((5, 3), step + 1.0), torch.zeros(5, 3))

def alone():
    return Twice()

number = 3

def needy(size):
    return Twice()
"""

NO_CLASS = '{"model_type": "qwen2", "architectures": ["NoSuchModel"]}'


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "user_model.py"
    path.write_text(USER_FILE)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_built_in_models_are_odd_sized_and_hide_nothing(name):
    torch.manual_seed(0)
    model, kind = tiny.build_tiny(name)
    batch = make_batch(kind, model.config, 0)
    loss = model.train()(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    vectors = [p for p in model.parameters() if p.dim() <= 1 and p.numel() > 1]
    assert all(p.std() > 0 for p in vectors), "norm weights of 1 and biases of 0 hide wrong reductions"
    if hasattr(model.config, "vocab_size"):
        assert model.config.vocab_size == 37
    assert torch.equal(loss, model(**batch).loss), "there must be no dropout"


def test_batches_are_ragged_and_differ_by_step():
    config = tiny.build_tiny("tiny-llama")[0].config
    batch = make_batch("causal", config, 0)
    assert batch["attention_mask"].sum(1).tolist() == list(LENGTHS)
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
    assert not torch.equal(batch["labels"], make_batch("causal", config, 1)["labels"])
    assert make_batch("causal", config, 0, rows=3)["labels"].shape == (3, 12)
    assert make_batch("causal", config, 0, rows=19)["labels"].shape == (19, 12)


def test_a_directory_is_verified_by_its_config(tmp_path):
    config = tiny.make_config(transformers.Qwen2Config, {"architectures": ["Qwen2ForSequenceClassification"]})
    config.save_pretrained(tmp_path)
    program = find_source(str(tmp_path)).build()
    assert type(program.model).__name__ == "Qwen2ForSequenceClassification"
    assert program.batch(0)["labels"].shape == (8,)
    for text, told in (("{}", "describes no model"), ("no json", "describes no model"), (NO_CLASS, "has no class NoSuchModel")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=told):
            find_source(str(tmp_path)).build()
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_source(str(tmp_path)).build()


def test_unknown_names_offer_what_is_allowed():
    for name in ("tiny-lama", "llama", "no/such/directory"):
        with pytest.raises(ConfigError, match=r"tiny-llama"):
            find_source(name).build()


def test_functions_of_files(user_file):
    program = find_source(f"{user_file}:whole").build()
    assert torch.equal(program.batch(0)[0], program.batch(1)[0])
    program = find_source(f"{user_file}:by_step", rows=2).build()
    assert program.batch(2)[0].tolist() == [[3.0] * 3] * 2
    with pytest.raises(ConfigError, match="without a batch"):
        find_source(f"{user_file}:alone").build()
    with pytest.raises(ConfigError, match="no function 'absent'"):
        find_source(f"{user_file}:absent").build()
    with pytest.raises(ConfigError, match="no function 'number'"):
        find_source(f"{user_file}:number").build()
    with pytest.raises(ConfigError, match="needs arguments for 'needy'"):
        find_source(f"{user_file}:needy").build()
    with pytest.raises(ConfigError, match="there is no file"):
        find_source("absent.py:f").build()


def test_a_file_finds_the_modules_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "module_beside.py").write_text(USER_FILE)
    path = tmp_path / "user_entry.py"
    path.write_text("def late():\n    from module_beside import whole\n    return whole()\n\nfrom module_beside import whole")
    for function in ("whole", "late"):
        assert type(find_source(f"{path}:{function}").build().model).__name__ == "Twice"


def test_equal_sources_start_from_equal_weights(user_file):
    sources = [FileFunction(str(user_file), "whole"), NamedModel("tiny-gpt2")]
    for source in sources:
        first, second = (digests(start_program(source, Run(steps=2), float64=True).model.state_dict()) for _ in range(2))
        assert first == second
        assert first != digests(start_program(source, Run(seed=1), float64=True).model.state_dict())


def test_the_reference_is_a_plain_loop(user_file):
    """Written out once more, for one model, with nothing but torch."""
    run = Run(steps=2, lr=0.3, clip_norm=0.05)
    source = FileFunction(str(user_file), "by_step")
    trace = reference(source, run)
    program = start_program(source, Run(steps=2), float64=True)
    model = program.model
    for step in range(2):
        inputs, targets = program.batch(step)
        loss = ((model(inputs) - targets) ** 2).sum() / 5
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        norm = torch.cat([g.flatten() for g in gradients if g is not None]).norm()
        assert trace.losses[step] == pytest.approx(loss.item(), rel=1e-14)
        assert trace.norms[step] == pytest.approx(norm.item(), rel=1e-14)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                if gradient is not None:
                    parameter -= 0.3 * gradient * min(1.0, 0.05 / (norm + 1e-6))
    for name, value in model.state_dict().items():
        assert torch.allclose(trace.weights[name], value, rtol=1e-13, atol=0)
    assert "unused.weight" not in trace.gradients[0]
    assert trace.order[:4] == ["first.weight", "first.bias", "layer.weight", "layer.bias"]
    assert trace.order[4:] == ["unused.weight", "unused.bias"]


def test_named_references_are_kept_and_functions_run_afresh():
    source, run = NamedModel("tiny-bert"), Run(steps=1)
    assert reference(source, run) is reference(NamedModel("tiny-bert"), run)
    assert reference(source, run) is not reference(NamedModel("tiny-bert", rows=3), run)
    functions = Functions(lambda: nn.Linear(2, 1), lambda: torch.ones(3, 2), lambda output, batch: output.mean())
    assert reference(functions, run) is not reference(functions, run)


def test_the_plain_loss_calls_a_model_as_a_single_device_program_does():
    class Model(nn.Module):
        def forward(self, inputs, labels=None):
            return inputs if labels is None else {"loss": (inputs - labels).mean()}

    inputs, labels = torch.arange(4.0), torch.ones(4)
    mapping, pair = {"inputs": inputs, "labels": labels}, (inputs, labels)
    assert plain_loss(Model(), None, mapping, None) == 0.5
    assert plain_loss(Model(), None, pair, None) == 0.5
    assert plain_loss(Model(), lambda out, batch: (out * batch["labels"]).sum(), mapping, None) == 6
    assert plain_loss(Model(), lambda out, target: ((out * target).sum(), 3), pair, None) == 2
    assert plain_loss(Model(), lambda out, batch: batch.sum(), inputs, None) == 6
    assert plain_loss(Model(), lambda out, batch: out, inputs, lambda model, batch: batch[3]) == 3


def test_every_dropout_is_turned_off():
    model = nn.Sequential(nn.Dropout(0.5), nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3))
    disable_dropout(model.train())
    inputs = torch.randn(2, 3, 8)
    assert torch.equal(model(inputs), model(inputs))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=37)).train()
    tokens = torch.ones(2, 4, dtype=torch.long)
    assert not torch.equal(gpt2(tokens).logits, gpt2(tokens).logits)
    disable_dropout(gpt2)
    assert torch.equal(gpt2(tokens).logits, gpt2(tokens).logits)


def test_the_norm_counts_every_element_once():
    assert norm_of({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0, 0.0]])}) == 5.0
    assert json.dumps(norm_of({})) == "0.0"
