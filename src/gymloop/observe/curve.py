"""A curve shows every step that has the metric, at its own place; a step whose value was not finite is a gap.

Text for the terminal, PNG for a page. Both are drawn from ``metrics.jsonl``, so a finished run can be drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gymloop.errors import DataError
from gymloop.observe.sinks import read_steps

Point = tuple[int, float]


def read_curve(path: Path, metric: str) -> list[Point]:
    """(step, value) of every step that has a finite value of the metric, in order.

    Raises:
        InfraError: the file cannot be read.
    """
    entries = read_steps(path)
    return [(entry["step"], entry[metric]) for entry in entries if entry.get(metric) is not None]


def draw_text(
    points: Sequence[Point], title: str, *, width: int = 60, height: int = 10, ascii_only: bool = False
) -> str:
    """The curve as text: values upwards, steps to the right, one mark per step, a bar from each to the next.

    Args:
        points: (step, value), steps ascending.
        title: the first line.
        width: columns of the plot itself; steps that fall into one column show the last.
        height: rows of the plot itself, at least 2.
        ascii_only: for terminals without Unicode.

    Raises:
        DataError: there is no point.
    """
    if not points:
        raise DataError(f"no step has {title}; there is nothing to draw")
    mark, bar, corner, floor, wall = ("*", "|", "+", "-", "|") if ascii_only else ("●", "│", "└", "─", "│")
    low, high = min(value for _, value in points), max(value for _, value in points)
    span = (high - low) or 1.0
    first, last = points[0][0], points[-1][0]
    steps = (last - first) or 1
    grid = [[" "] * width for _ in range(height)]
    rows: dict[int, int] = {}
    for step, value in points:
        rows[round((step - first) / steps * (width - 1))] = round((high - value) / span * (height - 1))
    previous: int | None = None
    for column, row in rows.items():
        if previous is not None:
            for between in range(min(previous, row), max(previous, row)):
                grid[between][column] = bar
        previous = row
    for column, row in rows.items():
        grid[row][column] = mark
    labels = {0: f"{high:.3g}", height - 1: f"{low:.3g}"}
    margin = max(len(label) for label in labels.values())
    lines = [title]
    lines += [f"{labels.get(row, ''):>{margin}} {wall}{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    lines.append(f"{'':>{margin}} {corner}{floor * width}")
    lines.append(f"{'':>{margin}}  {first:<{width - len(str(last))}}{last}")
    return "\n".join(lines)


def draw_png(points: Sequence[Point], title: str, path: Path) -> None:
    """The curve as a PNG file, without a display.

    Raises:
        DataError: there is no point.
    """
    if not points:
        raise DataError(f"no step has {title}; there is nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([step for step, _ in points], [value for _, value in points], marker="o", markersize=3)
    axes.set_xlabel("step")
    axes.set_ylabel(title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")
