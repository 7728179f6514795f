"""The folder of a run: what lies where, and when it may be used again."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import ConfigError


@dataclass(frozen=True)
class Folder:
    """The paths of one run."""

    root: Path

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def picture(self) -> Path:
        return self.root / "loss.png"

    @property
    def loads_picture(self) -> Path:
        return self.root / "experts.png"

    @property
    def sample(self) -> Path:
        return self.root / "sample.txt"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    def checkpoint(self, step: int) -> Path:
        return self.root / "checkpoints" / f"step-{step:06d}"

    def checkpoints(self) -> dict[int, Path]:
        """step -> path of what was saved, oldest first; what an interrupted save left behind has another name."""
        found = {}
        for path in sorted((self.root / "checkpoints").glob("step-*")):
            if match := re.fullmatch(r"step-(\d+)", path.name):
                found[int(match[1])] = path
        return found

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Makes the folder fit for a run.

        Raises: ConfigError where it holds a run already and neither `resume` nor `overwrite` is asked for.
        """
        used = self.events.exists() or bool(self.checkpoints())
        if used and overwrite and not resume:
            for path in (self.events, self.summary, self.picture, self.loads_picture, self.sample):
                path.unlink(missing_ok=True)
            for path in (self.model, self.tensorboard, self.root / "checkpoints"):
                shutil.rmtree(path, ignore_errors=True)
        elif used and not resume:
            raise ConfigError(
                f"the folder {self.root} holds a run already",
                allowed="--resume to continue it, --overwrite to replace it",
                remedy=f"--run.folder={self.root}-2",
            )
        self.root.mkdir(parents=True, exist_ok=True)
