"""Figures as SVG text: the same runs give the same file, byte for byte."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cofima.report import metrics
from cofima.report.groups import Group
from cofima.report.metrics import Summary
from cofima.report.runs import Run

# matplotlib is imported where something is drawn: tables alone do not wait for it
if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, distinct under any kind of color vision, without its yellow (too pale for lines).
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, GRID = "#1f2328", "#d0d7de"
MARKERS = "osD^vPX*"
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
STYLE = {
    "svg.fonttype": "none",  # text stays text: searchable, accessible, any script
    "svg.hashsalt": "cofima",
    "font.size": 11,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def accuracy(groups: Sequence[Group]) -> str | None:
    """Draw the accuracy on all classes seen, after each task; upper bounds are dashed levels."""
    return _lines(
        groups,
        lambda run: list(metrics.accuracies_over_time(run.matrix, run.sizes)) if run.history else [],
        "Accuracy on classes seen (%)",
    )


def distance(groups: Sequence[Group]) -> str | None:
    """Draw the distance of the backbone from its pre-trained weights, after each task.

    Methods that learn all classes at once are left out beside others: they may move a hundred times as far.
    """
    groups = [group for group in groups if not group.all_at_once] or groups
    return _lines(groups, lambda run: run.distances, "Distance from the start")


def matrix(group: Group) -> str | None:
    """Draw the accuracy after each task (down) on each task (across), averaged over seeds."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    tasks = len(group.runs[0].history)
    if group.all_at_once or not tasks:
        return None
    side = max(2.8, 1.1 + 0.3 * tasks)
    colors = matplotlib.colormaps["cividis"]
    with style():
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot()
        for t in range(tasks):
            for j in range(t + 1):
                value = metrics.summarize([run.matrix[t][j] for run in group.runs]).mean
                axes.add_patch(Rectangle((j + 0.53, t + 0.53), 0.94, 0.94, color=colors(value / 100)))
                shade = "#ffffff" if value < 45 else "#000000"
                axes.text(j + 1, t + 1, f"{value:.0f}", ha="center", va="center", color=shade, fontsize=9)
        span = (0.5, tasks + 0.5)
        axes.set(
            xlabel="Accuracy (%) on task", ylabel="After task", xlim=span, ylim=span[::-1], aspect="equal"
        )
        axes.set(xticks=_ticks(tasks), yticks=_ticks(tasks))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        return svg(figure)


def _lines(groups: Sequence[Group], curve: Callable[[Run], Sequence[float | None]], title: str) -> str | None:
    """Draw one line per group with a band of one standard deviation; None if there is nothing to draw."""
    from matplotlib.figure import Figure

    drawn = [(group, _over_seeds([curve(run) for run in group.runs])) for group in groups]
    if not any(points for _, points in drawn):
        return None
    labels = [_cut(group.label) for group, _ in drawn]
    columns = 3 if max(map(len, labels)) <= 10 else 2 if max(map(len, labels)) <= 22 else 1
    with style():
        figure = Figure(figsize=(4.8, 3.1 + 0.23 * -(-len(labels) // columns)), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        tasks = max(group.runs[0].planned for group, _ in drawn)
        handles = [_line(axes, group, points, place) for place, (group, points) in enumerate(drawn)]
        axes.set(xlabel="After task", ylabel=title, xlim=(0.7, tasks + 0.3), xticks=_ticks(tasks))
        legend = figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=11
        )
        for text in legend.get_texts():
            text.set_parse_math(False)  # a dollar sign in a label is a dollar sign
        return svg(figure)


def _line(axes: Any, group: Group, points: list[tuple[int, Summary]], place: int) -> Any:
    """Draw one group and return its legend handle."""
    if group.all_at_once:
        level = points[-1][1].mean if points else float("nan")
        return axes.axhline(level, color=INK, linestyle=(0, (6, 3)), linewidth=1.5)
    color = SERIES[place % len(SERIES)]
    dash = DASHES[place // len(SERIES) % len(DASHES)]
    at, means = [t for t, _ in points], [value.mean for _, value in points]
    spread = [value.std or 0.0 for _, value in points]
    if any(spread):
        low, high = ([m + sign * s for m, s in zip(means, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(at, low, high, color=color, alpha=0.18, linewidth=0)
    marker = MARKERS[place % len(MARKERS)]
    (line,) = axes.plot(at, means, color=color, linestyle=dash, marker=marker, markersize=5, linewidth=1.8)
    return line


def _over_seeds(curves: Sequence[Sequence[float | None]]) -> list[tuple[int, Summary]]:
    """Return mean and standard deviation after each task for which every seed has a value."""
    points = []
    for t, values in enumerate(zip(*curves, strict=True), start=1):
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            points.append((t, metrics.summarize(known)))
    return points


def _ticks(tasks: int) -> list[int]:
    """Return tick positions: all tasks, or every second, fifth, ... if there are many."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, tasks) if tasks / step <= 12 or step == tasks)
    return list(range(1, tasks + 1)) if step == 1 else [1, *range(step, tasks + 1, step)]


def _cut(label: str) -> str:
    """Shorten a legend label; matplotlib would drop one that begins with an underscore."""
    text = label if len(label) <= 48 else f"{label[:47]}…"
    return f"\u200b{text}" if text.startswith("_") else text


@contextmanager
def style() -> Iterator[None]:
    """Apply our style over matplotlib's defaults, ignoring the user's settings, and restore them after."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def svg(figure: "Figure") -> str:
    """Return the figure as an SVG element, without date or program version, so that it is reproducible."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]  # without the XML declaration, so that it can be embedded in HTML
