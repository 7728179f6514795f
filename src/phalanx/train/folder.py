"""The folder of a run: what lies where, and when it may be used again."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.series import Series
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

    @property
    def checkpoints(self) -> Series:
        return Series(self.root / "checkpoints")

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Makes the folder fit for a run.

        Raises: ConfigError where it holds a run already and neither `resume` nor `overwrite` is asked for.
        """
        used = self.events.exists() or bool(self.checkpoints.paths())
        if used and overwrite and not resume:
            for path in (self.events, self.summary, self.picture, self.loads_picture, self.sample):
                path.unlink(missing_ok=True)
            for path in (self.model, self.tensorboard, self.checkpoints.folder):
                shutil.rmtree(path, ignore_errors=True)
        elif used and not resume:
            raise ConfigError(
                f"the folder {self.root} holds a run already",
                allowed="--resume to continue it, --overwrite to replace it",
                remedy=f"--run.folder={self.root}-2",
            )
        self.root.mkdir(parents=True, exist_ok=True)
