"""A loop written by hand: two backwards before each update, the first without communication.

python examples/hand_written_loop.py
phalanx run -n 2 examples/hand_written_loop.py
"""

import torch
from torch import nn

import phalanx as px


def main() -> None:
    world = px.launch()
    booster = px.Booster("zero1", clip_norm=1.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, None, None, scheduler)

    # Without a loader from boost, each process brings rows of its own.
    rows = torch.Generator().manual_seed(world.rank)
    for step in range(10):
        halves = [torch.randn(6, 8, generator=rows) for _ in range(2)]
        with booster.no_sync():
            booster.backward((model(halves[0]).squeeze(1) - halves[0].sum(1)).square().mean(), optimizer)
        booster.backward((model(halves[1]).squeeze(1) - halves[1].sum(1)).square().mean(), optimizer)
        result = optimizer.step()
        scheduler.step()
        if world.rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {result.loss:.4f}, lr {result.lr:g}")


if __name__ == "__main__":
    main()
