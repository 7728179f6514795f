"""Counting tensors: what is kept, what a step rises to, and the prediction beside it."""

import torch

from phalanx.train.memory import TensorCount, activation_bytes_of_a_row, chunk_sizes


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
