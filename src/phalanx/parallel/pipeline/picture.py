"""Shows a table or a timeline: as text for a terminal, as SVG, and as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from phalanx.errors import ConfigError
from phalanx.parallel.pipeline.simulate import Span, Timeline
from phalanx.parallel.pipeline.table import COMPUTE, Kind, Table

# Dark text is readable on all of them; a second chunk is lighter.
COLOURS = {Kind.FORWARD: "#8fb7dd", Kind.BACKWARD: "#e8a87c", Kind.INPUT: "#e8a87c", Kind.WEIGHT: "#a9c99b"}
LIGHTER = {Kind.FORWARD: "#cfe0f1", Kind.BACKWARD: "#f6d9c6", Kind.INPUT: "#f6d9c6", Kind.WEIGHT: "#dcead6"}
INK, PAPER, IDLE = "#1f2933", "#ffffff", "#eceff2"
NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "backward, inputs", Kind.WEIGHT: "backward, weights"}
WIDTH, ROW, LEFT, TOP = 1000.0, 30.0, 70.0, 26.0


def print_table(table: Table, messages: bool = False) -> str:
    """One line for each rank; `messages` shows sends, receives and state too."""
    lines = []
    for rank, row in enumerate(table.rows):
        shown = [str(action) for action in row if messages or action.kind in COMPUTE]
        lines.append(f"rank {rank}: {' '.join(shown)}")
    return "\n".join(lines)


def print_timeline(timeline: Timeline, columns: int = 100) -> str:
    """The step as one line of characters for each rank: the micro-batch's last digit, `.` where a rank waits."""
    num_ranks = len(timeline.busy_s)
    lines = [["."] * columns for _ in range(num_ranks)]
    for span in timeline.spans:
        first = round(span.start / timeline.step_s * columns)
        last = max(round(span.stop / timeline.step_s * columns), first + 1)
        for place in range(first, min(last, columns)):
            mark = str(span.action.micro % 10)
            lines[span.rank][place] = mark if span.action.kind is Kind.FORWARD else chr(ord("A") + span.action.micro % 26).lower()
            if span.action.kind is Kind.WEIGHT:
                lines[span.rank][place] = "w"
    legend = "digit: forward of that micro-batch, letter: its backward (a = 0), w: weight half, .: waits"
    return "\n".join([f"rank {rank} |{''.join(line)}|" for rank, line in enumerate(lines)] + [legend])


def svg(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """A picture of one or several steps below each other, on one scale of time, each with its title."""
    longest = max(timeline.step_s for _, timeline in timelines) or 1.0
    body, y = [], TOP
    for title, timeline in timelines:
        note = f"{title}: step {_seconds(timeline.step_s)}, ranks wait {timeline.idle_fraction:.1%} of the time"
        body.append(f'<text x="{LEFT}" y="{y - 8}" class="title">{escape(note)}</text>')
        for rank in range(len(timeline.busy_s)):
            at = y + rank * ROW
            body.append(f'<text x="8" y="{at + ROW * 0.62}">rank {rank}</text>')
            width = timeline.step_s / longest * WIDTH
            body.append(f'<rect x="{LEFT}" y="{at}" width="{width:.2f}" height="{ROW - 4}" fill="{IDLE}"/>')
        body += [_box(span, y + span.rank * ROW, longest) for span in timeline.spans]
        y += len(timeline.busy_s) * ROW + TOP + 10
    body.append(_legend(y - 12))
    height = y + 14
    style = (
        f"text {{ font: 12px sans-serif; fill: {INK} }} .title {{ font-weight: bold }} .micro {{ font-size: 10px; text-anchor: middle }}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 10} {height}" width="{LEFT + WIDTH + 10}" height="{height}">'
    )
    background = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    return "\n".join([head, f"<style>{style}</style>", background, *body, "</svg>"]) + "\n"


def _box(span: Span, y: float, longest: float) -> str:
    x, width = LEFT + span.start / longest * WIDTH, max((span.stop - span.start) / longest * WIDTH, 0.5)
    colour = (LIGHTER if span.action.chunk % 2 else COLOURS)[span.action.kind]
    box = (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{ROW - 4}" fill="{colour}" stroke="{PAPER}" stroke-width="0.6">'
        f"<title>{span.action} {_seconds(span.start)} to {_seconds(span.stop)}</title></rect>"
    )
    label = f'<text class="micro" x="{x + width / 2:.2f}" y="{y + ROW * 0.58:.1f}">{span.action.micro}</text>'
    return box + (label if width > 9 else "")


def _legend(y: float) -> str:
    parts, x = [], LEFT
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT):
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{NAMES[kind]}</text>')
        x += 150
    parts.append(f'<text x="{x}" y="{y}">lighter: every second chunk of a rank</text>')
    return "".join(parts)


def _seconds(value: float) -> str:
    """A time for people; costs without a unit look the same from 1 on."""
    return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value:.4g} s"


def save_picture(path: Path, timelines: Sequence[tuple[str, Timeline]]) -> None:
    """Writes the picture as `path` ends: `.svg` or `.png`.

    Raises: ConfigError for another ending, or for PNG without matplotlib.
    """
    if path.suffix == ".svg":
        path.write_text(svg(timelines), encoding="utf-8")
    elif path.suffix == ".png":
        _save_png(path, timelines)
    else:
        raise ConfigError(f"a picture named {path.name!r}", allowed=".svg or .png", remedy=f"{path.stem}.svg")


def _save_png(path: Path, timelines: Sequence[tuple[str, Timeline]]) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError(
            "PNG pictures need matplotlib, which is not installed", remedy="pip install 'phalanx[pictures]', or .svg"
        ) from None
    rows = sum(len(timeline.busy_s) for _, timeline in timelines)
    figure = Figure(figsize=(12, 0.4 * rows + 0.8 * len(timelines) + 0.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    longest = max(timeline.step_s for _, timeline in timelines)
    all_axes = figure.subplots(len(timelines), squeeze=False, height_ratios=[len(timeline.busy_s) for _, timeline in timelines])
    for axes, (title, timeline) in zip(all_axes[:, 0], timelines):
        for span in timeline.spans:
            colour = (LIGHTER if span.action.chunk % 2 else COLOURS)[span.action.kind]
            length = span.stop - span.start
            axes.broken_barh([(span.start, length)], (span.rank - 0.4, 0.8), facecolors=colour, edgecolors=PAPER, linewidth=0.5)
            if length > longest / 80:
                axes.text(span.start + length / 2, span.rank, str(span.action.micro), ha="center", va="center", fontsize=7, color=INK)
        axes.set_xlim(0, longest)
        axes.set_yticks(range(len(timeline.busy_s)), [f"rank {rank}" for rank in range(len(timeline.busy_s))])
        axes.invert_yaxis()
        axes.set_title(f"{title}: step {_seconds(timeline.step_s)}, ranks wait {timeline.idle_fraction:.1%}", loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds], loc="outside lower left", ncols=3, frameon=False
    )
    figure.savefig(path)
