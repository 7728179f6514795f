"""Hands the events of a run to TensorBoard (extra `tensorboard`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.log import read_events
from phalanx.train.picture import curves


def require_tensorboard() -> None:
    """Raises: ConfigError where TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError("the export needs TensorBoard, which is not installed", remedy="pip install 'phalanx[tensorboard]'")


def export_tensorboard(events_path: Path, folder: Path) -> int:
    """Writes every curve in `events_path` as TensorBoard scalars into `folder`; returns how many points."""
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    points = 0
    with SummaryWriter(str(folder)) as writer:
        for name, curve in curves(read_events(events_path)).items():
            for step, value in sorted(curve.items()):
                writer.add_scalar(name.replace(".", "/"), value, step)
                points += 1
    return points
