"""A picture of a run, drawn from its events alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.log import Event, read_events

INK, LIGHT, GRID = "#1f4e79", "#9db8d2", "#e3e7eb"
SECOND = "#c55a11"


def curves(events: Iterable[Event]) -> dict[str, dict[int, float]]:
    """name -> step -> value of everything measured while training; where a resumed run repeats a step, the later value stands."""
    found: dict[str, dict[int, float]] = {}
    for event in events:
        if event.kind in ("train", "evaluate") and event.step is not None and isinstance(event.value, int | float):
            found.setdefault(f"{event.kind}.{event.name}", {})[event.step] = float(event.value)
    return found


def draw_losses(events_path: Path, picture_path: Path) -> None:
    """Draws training loss and validation bits per byte over the steps into a PNG file.

    Raises: ConfigError where matplotlib is not installed or the events hold no loss.
    """
    figure = _new_figure(8, 4.5)
    found = curves(read_events(events_path))
    losses = sorted(found.get("train.loss", {}).items())
    if not losses:
        raise ConfigError(f"{events_path} has no training loss to draw")
    axes = figure.add_subplot()
    axes.plot(*zip(*losses), color=LIGHT, linewidth=1)
    axes.plot(*zip(*smooth(losses)), color=INK, linewidth=2, label="training loss (nats per token, smoothed)")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.grid(color=GRID)
    axes.spines[["top", "right"]].set_visible(False)
    lines = axes.get_lines()[1:]
    bits = sorted(found.get("evaluate.bits_per_byte", {}).items())
    if bits:
        right = axes.twinx()
        lines += right.plot(*zip(*bits), color=SECOND, marker="o", label=f"validation bits per byte (last {bits[-1][1]:.3f})")
        right.set_ylabel("validation bits per byte")
        right.spines["top"].set_visible(False)
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False)
    figure.savefig(picture_path)


def draw_loads(events_path: Path, picture_path: Path) -> bool:
    """Draws how evenly choices fell on the experts over the steps, and each expert's share at the end; False without experts.

    Raises: ConfigError where matplotlib is not installed.
    """
    evenness: dict[str, dict[int, float]] = {}
    shares: dict[str, list[float]] = {}
    for event in read_events(events_path):
        if event.kind == "experts" and event.step is not None and isinstance(event.value, int | float):
            evenness.setdefault(event.name, {})[event.step] = float(event.value)
            chosen = [float(count) for count in event.attrs["chosen"]]
            shares[event.name] = [count * len(chosen) / max(sum(chosen), 1.0) for count in chosen]
    if not shares:
        return False
    figure = _new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    for number, points in enumerate(evenness.values()):
        left.plot(*zip(*sorted(points.items())), label=f"layer {number}")
    left.set_xlabel("step")
    left.set_ylabel("evenness of the choices (1: all experts alike)")
    left.grid(color=GRID)
    left.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    image = right.imshow(list(shares.values()), aspect="auto", cmap="Blues", vmin=0)
    right.set_xlabel("expert")
    right.set_ylabel("layer")
    right.set_yticks(range(len(shares)))
    figure.colorbar(image, label="choices, relative to an even share")
    figure.savefig(picture_path)
    return True


def _new_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib, which is not installed", remedy="pip install 'phalanx[pictures]'") from None
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def smooth(points: list[tuple[int, float]], weight: float = 0.9) -> list[tuple[int, float]]:
    """An exponential mean that starts unbiased."""
    total = scale = 0.0
    smoothed = []
    for step, value in points:
        total, scale = weight * total + (1 - weight) * value, weight * scale + (1 - weight)
        smoothed.append((step, total / scale))
    return smoothed
