"""Counting tensors: what is kept, what a step rises to, and the prediction beside it."""

import torch

from phalanx.anatomy import layer_stacks
from phalanx.booster.stages import recompute_by_stage, recomputes, table_and_cut
from phalanx.plan import Plan
from phalanx.train.memory import TensorCount, activation_bytes_of_a_row, chunk_sizes
from phalanx.train.stage_memory import Parts


def test_kept_and_peak_are_the_bytes_that_live():
    kept = torch.zeros(1000)
    with TensorCount() as count:
        before = count.kept
        first = kept + 1
        second = first.view(10, 100) * 2
        del first
        third = second[0] + 1
    assert before >= 4000
    assert count.kept == before
    assert count.peak - before == 8000
    assert third.numel() == 100


def test_what_autograd_keeps_counts_although_no_name_holds_it():
    weight = torch.randn(50, 50, requires_grad=True)
    with TensorCount() as count:
        loss = (weight.exp().exp()).sum()
    assert count.peak - count.kept >= 2 * 50 * 50 * 4
    loss.backward()


def test_a_storage_counts_with_the_size_it_has_and_ignored_tensors_do_not():
    large = torch.zeros(100_000)
    with TensorCount() as all_tensors:
        pass
    with TensorCount(ignored=[large]) as count:
        grown = torch.zeros(10)
        grown.untyped_storage().resize_(8000)
        torch.zeros(1)
    assert all_tensors.kept - count.kept == 400_000
    assert count.peak - count.kept == 8004


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x).relu()
        loss = torch.nn.functional.cross_entropy(self.head(x), labels)
        return type("Output", (), {"loss": loss})


def test_activations_of_a_row_grow_with_its_length_and_leave_no_gradient():
    model = Model()
    found = activation_bytes_of_a_row(model, {"x": torch.randn(2, 8), "labels": torch.zeros(2, dtype=torch.int64)})
    assert 3 * 8 * 4 <= found <= 20 * 8 * 4
    assert all(parameter.grad is None for parameter in model.parameters())


def test_chunks_are_the_layers_and_the_rest():
    assert chunk_sizes(Model()) == [45, 72, 72, 72]


class Stacked(Model):
    """The same between an embedding and a head, on words."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)) for _ in range(4)]
        )

    def forward(self, x, labels):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        loss = torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return type("Output", (), {"loss": loss})


def test_stages_keep_what_their_layers_keep():
    """A layer keeps its input for the first product (the previous one's output), and what the activation made: 8 + 32 numbers a word."""
    model, words = Stacked(), torch.zeros(2, 5, dtype=torch.int64)
    _, cut = table_and_cut(model, tuple(layer_stacks(model)), Plan.parse("pp2"))
    parts = Parts(model, {"x": words, "labels": words}, cut, 3)
    first, last = (parts.stage(stage, False) for stage in range(2))
    hidden = 3 * 5 * 8 * 4
    assert (first.received, first.handed, last.received, last.handed) == (0, hidden, hidden, 0)
    num_first = cut.starts[1]
    assert first.kept == num_first * 15 * (8 + 32) * 4
    assert (4 - num_first) * 15 * (8 + 32) * 4 <= last.kept <= (4 - num_first) * 15 * (8 + 32) * 4 + 15 * (8 + 3 * 5 + 2) * 4
    assert first.forward >= first.kept
    assert last.backward > 0


def test_a_halved_backward_rises_by_what_each_half_does():
    model, words = Stacked(), torch.zeros(2, 5, dtype=torch.int64)
    _, cut = table_and_cut(model, tuple(layer_stacks(model)), Plan.parse("pp2"))
    alone, summed = (Parts(model, {"x": words, "labels": words}, cut, 3, stays=stays) for stays in (True, False))
    first, last = (alone.stage(stage, True) for stage in range(2))
    # The first stage sends no gradients on, so its first half does nothing and keeps everything.
    assert (first.kept_for_weights, first.weight, first.first_weight) == (first.kept + first.handed, first.backward, first.first)
    assert last.first_weight <= last.gradients
    assert last.first > last.backward
    # Gradients that are summed with others' lie in one piece of memory for each layer, which the first of them brings.
    assert summed.stage(0, False).first > alone.stage(0, False).first


def test_a_stage_that_recomputes_keeps_the_inputs_of_its_layers():
    model, words = Stacked(), torch.zeros(2, 5, dtype=torch.int64)
    plan = Plan.parse("pp2+recompute=full,0")
    table, cut = table_and_cut(model, tuple(layer_stacks(model)), plan)
    recompute_by_stage(plan, table, cut)
    assert [recomputes(cut, stage) for stage in range(2)] == [True, False]
    parts = Parts(model, {"x": words, "labels": words}, cut, 3)
    other = Stacked()
    plain = Parts(other, {"x": words, "labels": words}, table_and_cut(other, tuple(layer_stacks(other)), Plan.parse("pp2"))[1], 3)
    first, last = (parts.stage(stage, False) for stage in range(2))
    assert first.kept <= cut.starts[1] * (15 * 8 * 4 + 5056)  # and the random state, to draw the same again
    assert first.backward > plain.stage(0, False).backward
    assert first.input == first.backward  # not halved, it runs where its first half would
    assert (last.kept, last.backward) == (plain.stage(1, False).kept, plain.stage(1, False).backward)
