"""Where the stream between projections may be cut by features, and where not; what norms compute."""

import pytest
import torch
from torch import nn

from phalanx.anatomy import call_with, read_anatomy, read_norm, read_stream
from tests.numerics import tensor_programs as programs


def reading_of(model):
    call = call_with(programs.batch(0), None)
    return read_stream(model, read_anatomy(model, 2, call).seams, call)


class Stirred(programs.CountedBlock):
    """Mixes features outside of any norm."""

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x)) * x.mean(-1, keepdim=True)


class Scaled(programs.CountedBlock):
    """Multiplies the stream by a parameter that is read beside all modules."""

    def __init__(self, width=24):
        super().__init__(width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x + self.attention(self.attention_norm(x)) * self.gamma


@pytest.mark.parametrize("name", ["counted", "relative"])
def test_blocks_of_norms_and_groups_can_be_cut(name):
    model, _, _ = getattr(programs, name)()
    reading = reading_of(model)
    assert not reading.faults
    assert not reading.joining


def test_a_whole_projection_that_gives_into_the_stream_is_found():
    model, _, _ = programs.summed()
    reading = reading_of(model)
    assert not reading.faults
    assert [name for name, _ in model.named_modules() if reading.joins(name)] == [f"blocks.{number}.mlp.2" for number in range(3)]


@pytest.mark.parametrize(("block", "fault"), [(Stirred, "mixes features"), (Scaled, "blocks.0.gamma, which no module of its own reads")])
def test_what_cannot_be_cut_is_named(block, fault):
    reading = reading_of(programs.small(programs.Decoder(lambda: block(24), 24)))
    assert any(fault in reason for reason in reading.faults.values())


class Shifted(nn.Module):
    """An RMSNorm whose weight is an offset from one, summed in float32."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x):
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight.float())).type_as(x)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.LayerNorm(9), (True, 1e-5, "weight", 0.0, "bias")),
        (nn.LayerNorm(9, eps=1e-12, elementwise_affine=False), (True, 1e-12, None, 0.0, None)),
        (nn.RMSNorm(9), (False, None, "weight", 0.0, None)),
        (Shifted(9), (False, 1e-6, "weight", 1.0, None)),
    ],
)
def test_norms_are_read(module, expected):
    norm = read_norm(module)
    assert (norm.is_centred, norm.eps, norm.scale, norm.offset, norm.shift) == expected


@pytest.mark.parametrize("module", [nn.PReLU(9), nn.Linear(9, 9), nn.GroupNorm(3, 9)])
def test_what_is_no_norm_is_told_from_one(module):
    assert read_norm(module) is None
