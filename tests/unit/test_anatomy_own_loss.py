"""A model's own loss is a mean; these tests cut batches, add up mean x count, and want the loss of the whole batch back."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from phalanx.anatomy import own_loss
from phalanx.errors import ConfigError, ShapeError
from phalanx.precision import lift_to_float64
from phalanx.verify import tiny
from phalanx.verify.batches import make_batch, map_floats
from phalanx.verify.program import disable_dropout

FAMILIES = ["tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-vit", "tiny-t5", "tiny-bart", "tiny-whisper", "tiny-distilbert", "tiny-electra"]
# Labels reach the loss shifted by the forward, unshifted, through the seam and written out; count at all of them.
HEADS = [
    ("bert", "BertLMHeadModel", "causal"),
    ("bert", "BertForSequenceClassification", "classes"),
    ("bert", "BertForTokenClassification", "tokens"),
    ("bert", "BertForMultipleChoice", "choices"),
    ("bert", "BertForQuestionAnswering", "spans"),
    ("bert", "BertForNextSentencePrediction", "pairs"),
    ("llama", "LlamaForSequenceClassification", "classes"),
    ("llama", "LlamaForTokenClassification", "tokens"),
    ("llama", "LlamaForQuestionAnswering", "spans"),
    ("bart", "BartForCausalLM", "causal"),
    ("gpt2", "GPT2ForTokenClassification", "tokens"),
    ("biogpt", "BioGptForTokenClassification", "tokens"),
]


def build(model_type, class_name, **overrides):
    torch.manual_seed(0)
    config = tiny.make_config(transformers.CONFIG_MAPPING[model_type], {**tiny.BY_TYPE.get(model_type, {}), **overrides})
    model = getattr(transformers, class_name)(config).double().train()
    disable_dropout(model)
    return model


def batch_for(kind, config):
    batch = make_batch("causal", config, 0)
    rows, length = batch["input_ids"].shape
    padding = batch["attention_mask"] == 0
    if kind == "tokens":
        batch["labels"] = torch.randint(config.num_labels, (rows, length)).masked_fill(padding, -100)
    elif kind == "classes":
        batch["labels"] = torch.randint(config.num_labels, (rows,))
    elif kind == "pairs":
        batch["labels"] = torch.randint(2, (rows,))
    elif kind == "choices":
        batch["labels"] = torch.randint(3, (rows,))
        batch |= {name: batch[name][:, None].repeat(1, 3, 1) for name in ("input_ids", "attention_mask")}
    elif kind == "spans":
        del batch["labels"]
        # Rows 1 and 5 have their answer behind the input.
        batch["start_positions"] = torch.tensor([0, 12, 2, 3, 1, 40, 1, 0])
        batch["end_positions"] = torch.tensor([3, 12, 4, 3, 2, 41, 2, 1])
    return batch


def loss_by_pieces(model, batch, sizes):
    """Sum over pieces of (mean x count) / total count; pieces whose items are all ignored add nothing."""
    own, total, count, start = own_loss(model), 0.0, 0, 0
    for size in sizes:
        piece = {name: value[start : start + size] for name, value in batch.items()}
        start += size
        number, keywords = int(own.count(piece)), own.kwargs(piece)
        loss = model(**piece, **keywords).loss
        total += (loss if keywords else loss * number) if number else 0.0
        count += number
    return total / count


def assert_cut_changes_nothing(model, batch):
    with lift_to_float64(), torch.no_grad():
        whole = model(**batch).loss
        for sizes in ([8], [1] * 8, [5, 1, 2]):
            assert abs(loss_by_pieces(model, batch, sizes) - whole) < 1e-12 * abs(whole)


@pytest.mark.parametrize("name", FAMILIES)
def test_cut_batches_give_the_loss_of_the_whole_one(name):
    torch.manual_seed(0)
    model, kind = tiny.build_tiny(name)
    assert_cut_changes_nothing(model.double(), map_floats(torch.Tensor.double, make_batch(kind, model.config, 0)))


@pytest.mark.parametrize(("model_type", "class_name", "kind"), HEADS)
def test_every_kind_of_head_is_counted_as_it_counts(model_type, class_name, kind):
    model = build(model_type, class_name, **({"num_labels": 2} if kind == "spans" else {}))
    assert_cut_changes_nothing(model, batch_for(kind, model.config))


@pytest.mark.parametrize(("num_labels", "problem"), [(1, None), (3, "regression"), (3, "multi_label_classification"), (3, None)])
def test_regression_and_multi_label_losses_are_means_over_rows(num_labels, problem):
    config = tiny.make_config(transformers.BertConfig, {"num_labels": num_labels, "problem_type": problem})
    model = transformers.BertForSequenceClassification(config).double().eval()
    batch = make_batch("causal", config, 0)
    labels = torch.randn(8, num_labels) if problem == "regression" or num_labels == 1 else torch.randint(2, (8, num_labels))
    assert_cut_changes_nothing(model, {**batch, "labels": labels.double()})
    assert own_loss(model).count({**batch, "labels": labels.double()}) == 8


def test_a_wrong_count_is_noticed_by_the_test_above():
    model = build("bart", "BartForCausalLM")
    batch = batch_for("causal", model.config)
    own = own_loss(model)
    object.__setattr__(own, "shifts_labels", True)  # as its name suggests, and its source denies
    with torch.no_grad():
        whole = model(**batch).loss
        pieces = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(8)]
        counts = [own.count(piece) for piece in pieces]
        wrong = sum(model(**piece).loss * count for piece, count in zip(pieces, counts)) / sum(counts)
    assert abs(wrong - whole) > 1e-5 * whole


def test_causal_labels_are_counted_after_the_shift():
    model = build("llama", "LlamaForCausalLM")
    own = own_loss(model)
    assert own.shifts_labels
    assert own.takes_num_items
    labels = torch.tensor([[1, 2, 3, -100], [4, -100, -100, -100]])
    assert own.count({"labels": labels}) == 2
    assert own.count({"labels": None, "shift_labels": labels}) == 4


def test_a_loss_of_two_means_is_refused():
    model = build("bert", "BertForPreTraining")
    with pytest.raises(ConfigError, match=r"BertForPreTraining.*criterion"):
        own_loss(model).count(batch_for("causal", model.config))


def test_an_answer_cut_in_two_is_refused():
    model = build("bert", "BertForQuestionAnswering", num_labels=2)
    batch = batch_for("spans", model.config)
    batch["start_positions"][1] = 3
    with pytest.raises(ShapeError, match="two means"):
        own_loss(model).count(batch)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch)


def test_wrappers_are_looked_through():
    own = own_loss(Wrapper(build("llama", "LlamaForCausalLM")))
    assert (own.model, own.shifts_labels, own.takes_num_items) == ("LlamaForCausalLM", True, True)


class Shifting(nn.Module):
    def forward(self, input_ids, labels):
        logits = F.one_hot(input_ids, 5).double()
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class Plain(nn.Module):
    def forward(self, inputs, labels):
        return {"loss": F.mse_loss(inputs, labels)}


def test_other_models_are_read_from_source_and_default_to_labels_or_rows():
    labels = torch.tensor([[1, -100, 2], [3, 4, -100]])
    assert own_loss(Shifting()).count({"input_ids": labels, "labels": labels}) == 2
    assert own_loss(Plain()).count({"inputs": labels, "labels": labels}) == 4
    assert own_loss(Plain()).count({"inputs": torch.ones(3, 2), "labels": torch.ones(3, 2)}) == 3
    assert own_loss(Plain()).count((torch.ones(7, 2), torch.ones(7))) == 7
    assert own_loss(Plain()).count(torch.ones(6, 2)) == 6
