"""One rank of a training run: `torchrun -m phalanx.train RECIPE [a.b=c ...]`; `phalanx train` starts its ranks with this."""

from __future__ import annotations

import sys

from phalanx.train.loop import train
from phalanx.train.recipe import load_recipe


def main(words: list[str]) -> None:
    """The first word is the recipe; `--resume` continues; the rest are overrides."""
    resume = "--resume" in words
    path, *overrides = [word for word in words if word != "--resume"]
    train(load_recipe(path, overrides), resume=resume)


if __name__ == "__main__":
    main(sys.argv[1:])
