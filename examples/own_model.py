"""A model of one's own under any plan: the program of one device, and three lines of Phalanx.

python examples/own_model.py
phalanx run -n 2 examples/own_model.py --plan zero3
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px


class Classifier(nn.Module):
    """Residual layers between an embedding of the input and a head."""

    def __init__(self, width: int = 64, layers: int = 3):
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)])
        self.leave = nn.Linear(width, 2)

    def forward(self, points):
        hidden = self.enter(points)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.leave(hidden)


def rings(points: int) -> TensorDataset:
    """Points in the plane and whether they lie inside a ring."""
    generator = torch.Generator().manual_seed(0)
    xy = torch.rand(points, 2, generator=generator) * 4 - 2
    return TensorDataset(xy, ((xy.norm(dim=1) - 1).abs() < 0.4).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="zero2")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    world = px.launch()
    booster = px.Booster(arguments.plan, clip_norm=1.0)
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(rings(1500), batch_size=50, shuffle=True)  # the global batch, whatever the number of processes
    model, optimizer, _criterion, loader, _ = booster.boost(model, optimizer, nn.functional.cross_entropy, loader)

    step = 0
    while step < arguments.steps:
        for batch in loader:
            result = booster.step(batch)
            step += 1
            if world.rank == 0 and step % 10 == 0:
                print(f"step {step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.4f}")
            if step == arguments.steps:
                break


if __name__ == "__main__":
    main()
