"""Heads other than the next word's on a model in stages: every rank tells the loss of one process, and gradients are equal."""

import pytest
import torch
from booster_programs import TOLERANCE, WIDTH, Decoder, batch, sgd, worst
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForSequenceClassification

import phalanx as px
from phalanx.precision import lift_to_float64
from phalanx.testing import run_ranks


def classifier(num_labels):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=37, pad_token_id=0, num_labels=num_labels, **sizes)).double()


class Valued(Decoder):
    """A next-word model with a head that values every state."""

    def __init__(self):
        super().__init__(tied=True)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x), self.value(x)[..., 0]


def of_both_heads(output, rows):
    logits, values = output
    words = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
    return words + 0.5 * ((values - 0.3) ** 2 * (rows["labels"] >= 0)).sum(), (rows["labels"] >= 0).sum()


def program(kind):
    """(model, criterion, batch) of a kind of head; rows have very different lengths, filled up with 0 on the right."""
    torch.manual_seed(0)
    rows = batch(1)
    if kind == "value":
        return Valued().double(), of_both_heads, rows
    words = torch.where(rows["labels"] >= 0, rows["words"].clamp(min=1), 0)
    words[:, 0] = 1
    labels = torch.arange(8) % 3 if kind == "classes" else torch.linspace(-1, 1, 8, dtype=torch.float64)
    return classifier(3 if kind == "classes" else 1), None, {"input_ids": words, "attention_mask": (words > 0).long(), "labels": labels}


def stages(plan, kind):
    model, criterion, rows = program(kind)
    with lift_to_float64():
        booster = px.Booster(plan)
        booster.boost(model, sgd(model), criterion)
        loss = booster.forward_backward(rows).loss
        return loss, booster.gradients()


@pytest.mark.parametrize("kind", ["classes", "reward", "value"])
def test_heads_of_other_kinds(kind):
    model, criterion, rows = program(kind)
    with lift_to_float64():
        if criterion is None:
            loss = model(**rows).loss
        else:
            total, count = criterion(model(rows["words"]), rows)
            loss = total / count
        loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for found, gradients in run_ranks(stages, 2, "pp2+micro3", kind):
        assert found == pytest.approx(loss.item(), rel=TOLERANCE)
        assert worst({name: gradients[name] for name in expected}, expected) < TOLERANCE


def losing_a_head(kind):
    """A fault on purpose: half of the last stage's loss is not differentiated."""
    from phalanx.parallel.pipeline.run import Runner

    end = Runner._end_forward
    Runner._end_forward = lambda self, flight, visit, loss, count: end(self, flight, visit, 0.5 * loss + 0.5 * loss.detach(), count)
    return stages("pp2", kind)


def test_a_head_that_is_lost_is_seen_in_the_gradients_and_not_in_the_loss():
    model, _, rows = program("classes")
    with lift_to_float64():
        loss = model(**rows).loss
        loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found, gradients = run_ranks(losing_a_head, 2, "classes")[0]
    assert found == pytest.approx(loss.item(), rel=TOLERANCE)
    assert worst({name: gradients[name] for name in expected}, expected) > 0.1
