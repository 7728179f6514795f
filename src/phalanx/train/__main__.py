"""One rank of a training run: `torchrun -m phalanx.train RECIPE [a.b=c ...]`; `phalanx train` starts its ranks with this."""

from __future__ import annotations

import sys

from phalanx.cluster.stopping import STOPPED
from phalanx.train.loop import train
from phalanx.train.recipe import load_recipe


def main(words: list[str]) -> int:
    """The first word is the recipe; `--resume` continues; the rest are overrides. Returns the exit code."""
    resume = "--resume" in words
    path, *overrides = [word for word in words if word != "--resume"]
    return 0 if train(load_recipe(path, overrides), resume=resume) else STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
