"""What a person's model or criterion may do under tensor parallelism beside the usual: equal to one process, or refused by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx as px
from phalanx.errors import PlanError
from phalanx.plan import Plan
from phalanx.testing import run_ranks

WIDTH, SIZE, ROWS, LENGTH = 12, 37, 3, 7


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """`beside` is done to the stream before the attention; `rate` is that of a dropout which no attribute's name tells."""

    def __init__(self, beside, rate):
        super().__init__()
        self.beside, self.rate = beside, rate
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x):
        x = BESIDE[self.beside](self, x)
        x = x + self.attention(self.first(x))
        inner = F.dropout(F.gelu(self.up(self.second(x))), self.rate, self.training)
        return x + F.dropout(self.down(inner), self.rate, self.training)


BESIDE = {
    "nothing": lambda block, x: x,
    "positions": lambda block, x: x + block.places[: x.shape[1]],
    "mean": lambda block, x: x + x.mean(1, keepdim=True),
}


class Decoder(nn.Module):
    def __init__(self, beside="nothing", rate=0.0, size=SIZE, blocks=None):
        super().__init__()
        self.tokens = nn.Embedding(size, WIDTH)
        self.blocks = blocks or nn.ModuleList(Block(beside, rate) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, size)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(*args, **kwargs):
    torch.manual_seed(0)
    return Decoder(*args, **kwargs).double()


def encoder():
    """Layers of PyTorch that pass by their modules in evaluation."""
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(WIDTH, 4, 20, dropout=0.0, batch_first=True) for _ in range(2))
    return Decoder(blocks=nn.ModuleList(layers)).double()


def batch(size=SIZE, labelled=ROWS):
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(size, (ROWS, LENGTH), generator=generator) for _ in range(2))
    labels[1:, 4:] = -100
    labels[labelled:] = -100
    return tokens, labels


def usual(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def one_forbidden(logits, labels):
    logits[..., 5] = -3.0
    return usual(logits, labels)


def halved_in_place(logits, labels):
    same = logits.contiguous()
    same /= 2
    return usual(logits, labels)


def looked_at_flat(logits, labels):
    return usual(logits.view(-1).view(logits.shape).narrow(-1, 0, logits.shape[-1]), labels)


def narrowed_to_all(logits, labels):
    return usual(logits.narrow(-1, 0, logits.shape[-1]), labels)


def halved_behind(logits, labels):
    logits.detach().mul_(0.5)
    return usual(logits, labels)


def worst(plan, build, criterion=usual, size=SIZE, labelled=ROWS):
    """The largest relative error of a gradient; what was said where it was refused."""
    tokens, labels = batch(size, labelled)
    reference = build()
    criterion(reference(tokens), labels).backward()
    booster = px.Booster(plan)
    try:
        booster.boost(build(), None, criterion, [(tokens, labels)])
        booster.forward_backward((tokens, labels))
    except (PlanError, RuntimeError) as error:
        return str(error)
    found = booster.gradients()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    least = 1e-6 * max(float(grad.abs().max()) for grad in expected.values())
    return max(float((found[name] - grad).abs().max() / max(grad.abs().max(), least)) for name, grad in expected.items())


@pytest.mark.parametrize("criterion", [one_forbidden, halved_in_place, looked_at_flat, narrowed_to_all])
def test_a_criterion_may_write_to_logits_and_look_at_them_in_any_shape(criterion):
    assert run_ranks(worst, 2, "tp2", decoder, criterion)[0] < 1e-9


def test_logits_that_something_else_looks_at_are_not_written_to():
    assert "changed in place (mul_)" in run_ranks(worst, 2, "tp2", decoder, halved_behind)[0]


def of_two_tokens():
    return decoder(size=2)


def test_a_vocabulary_smaller_than_the_ranks_stays_whole():
    assert run_ranks(worst, 3, "tp3", of_two_tokens, usual, 2)[0] < 1e-9


@pytest.mark.parametrize("tp", [1, 2])
def test_a_chunked_loss_has_passes_without_labels(tp):
    assert run_ranks(worst, tp, Plan(tp=tp, acc=3, chunked_loss=True), decoder, usual, SIZE, 1)[0] < 1e-9


def with_positions():
    return decoder("positions")


def with_mean():
    return decoder("mean")


@pytest.mark.parametrize(
    ("build", "place"), [(with_positions, "blocks.0.attention"), (with_mean, "blocks.0.attention"), (encoder, "blocks.0.linear1")]
)
def test_sp_refuses_blocks_that_need_other_tokens(build, place):
    assert run_ranks(worst, 2, "tp2", build)[0] < 1e-9
    assert f"the input of {place} has other numbers" in run_ranks(worst, 2, "tp2+sp", build)[0]


def test_sp_takes_blocks_that_do_not():
    assert run_ranks(worst, 3, "tp3+sp", decoder)[0] < 1e-9


def unknown(place):
    """What is said of a token that is not in the vocabulary."""
    tokens, labels = batch()
    booster = px.Booster("tp2")
    booster.boost(decoder(), None, usual, [batch()])
    (tokens if place == "tokens" else labels)[0, 1] = SIZE if place != "negative" else -1
    try:
        return float(booster.forward_backward((tokens, labels)).loss)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("place", ["tokens", "labels", "negative"])
def test_tokens_outside_of_the_vocabulary_are_refused(place):
    assert all("a token is not among the 37" in str(found) for found in run_ranks(unknown, 2, place))


def dropped():
    """What comes out of the last block in training, where the ranks draw different amounts."""
    seen = []
    model = decoder(rate=0.5)
    booster = px.Booster("tp2")
    booster.boost(model, None, usual, [batch()])
    model.blocks[-1].register_forward_hook(lambda block, args, output: seen.append(output.detach()))
    booster.forward_backward(batch())
    return seen[0]


def test_draws_that_no_attribute_tells_are_seen():
    first, second = run_ranks(dropped, 2)
    assert torch.equal(first, second)


def evaluated():
    model, reference = encoder().eval(), encoder().eval()
    px.Booster("tp2").boost(model, None, usual, [batch()])
    with torch.no_grad():
        return float((model(batch()[0]) - reference(batch()[0])).abs().max())


def test_layers_that_pass_by_their_modules_are_evaluated_rightly():
    assert run_ranks(evaluated, 2)[0] < 1e-12
