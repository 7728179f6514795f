"""How a chunk collects the gradients of its parameters."""

import torch
from torch import nn

from phalanx.cluster.mesh import Mesh
from phalanx.memory.axes import StateAxes
from phalanx.memory.chunk import Chunk, Slot
from phalanx.memory.policy import ZERO
from phalanx.precision import Precision


def chunk_of(*shapes):
    mesh = Mesh({"dp": 1, "pp": 1, "cp": 1, "tp": 1})
    slots = [Slot(f"p{number}", nn.Parameter(torch.zeros(shape)), []) for number, shape in enumerate(shapes)]
    dtypes = Precision.of("fp32").for_parameter(torch.float32)
    chunk = Chunk("unit", slots, dtypes, ZERO[2], StateAxes.cut(mesh, mesh.axis("dp")), torch.device("cpu"))
    chunk.allocate()
    return chunk


def test_a_gradient_that_fills_its_chunk_is_the_buffer():
    """Cost: an embedding's gradient exists once, not twice."""
    chunk = chunk_of((4, 8))
    gradient = torch.randn(4, 8)
    chunk.add_gradient(chunk.slots[0], gradient)
    assert chunk.gradient.data_ptr() == gradient.data_ptr()
    chunk.add_gradient(chunk.slots[0], torch.ones(4, 8))
    assert torch.equal(chunk.gradient.view(4, 8), gradient)
    assert chunk.slots[0].used


def test_a_gradient_of_another_form_is_copied():
    for chunk, gradient in [
        (chunk_of((4, 8)), torch.randn(8, 4).T),
        (chunk_of((4, 8)), torch.randn(4, 8).double()),
        (chunk_of((4, 8), (16,)), torch.randn(4, 8)),
        (chunk_of((3, 5)), torch.randn(3, 5)),
    ]:
        before = gradient.clone()
        chunk.add_gradient(chunk.slots[0], gradient)
        chunk.add_gradient(chunk.slots[0], torch.ones_like(gradient))
        assert torch.equal(gradient, before)
        assert torch.equal(chunk.slots[0].view(chunk.gradient), gradient.float() + 1)
