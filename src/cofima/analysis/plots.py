"""Figures of analyses, in the style of reports: bars, matrices and planes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cofima.report.drawing import (
    COLORMAP,
    GRID,
    INK,
    MARKERS,
    SERIES,
    canvas,
    finish,
    name,
    squares,
    svg,
)

CROWDED = 16  # maximum number of bars with room for their numbers
Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Bars:
    """A named bar per group, or None for no bar; ``published`` values are drawn on it as diamonds."""

    label: str
    heights: Sequence[float | None]
    spread: Sequence[float | None] = ()
    published: Sequence[float | None] = ()


@dataclass(frozen=True)
class Spot:
    """A named point in a plane."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Trail:
    """A named trajectory in a plane; ``steps`` are the start and end points of additional arrows."""

    label: str
    points: Sequence[tuple[float, float]]
    steps: Sequence[tuple[tuple[float, float], tuple[float, float]]] = ()


@dataclass(frozen=True)
class Surface:
    """Values over a grid in a plane: ``values[row][column]`` at ``ys[row]``, ``xs[column]``."""

    xs: Sequence[float]
    ys: Sequence[float]
    values: Matrix
    label: str


def bars(groups: Sequence[str], drawn: Sequence[Bars], up: str, title: str = "") -> str:
    """Draw grouped bars, with one bar of each kind per group and the spread over seeds."""
    wide = 0.8 / len(drawn)
    with canvas(min(8.0, max(5.2, 1.6 + 1.1 * len(groups))), 3.8) as figure:
        axes = figure.add_subplot()
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        handles: list[Any] = []
        quoted: list[Any] = []
        for place, kind in enumerate(drawn):
            at = [group - 0.4 + (place + 0.5) * wide for group in range(len(groups))]
            heights = [0.0 if height is None else height for height in kind.heights]
            made = axes.bar(at, heights, width=0.9 * wide, color=SERIES[place % len(SERIES)])
            handles.append(made)
            if len(groups) * len(drawn) <= CROWDED:
                texts = ["" if height is None else f"{height:.1f}" for height in kind.heights]
                axes.bar_label(made, texts, fontsize=8)
            if any(kind.spread):
                spread = [s or 0.0 for s in kind.spread]
                axes.errorbar(at, heights, spread, fmt="none", ecolor=INK, elinewidth=1.2)
            theirs = [(x, y) for x, y in zip(at, kind.published, strict=False) if y is not None]
            for spot in theirs:
                quoted = axes.plot(*spot, "D", color="#ffffff", markeredgecolor=INK, markersize=6)
        labels = [kind.label for kind in drawn]
        if quoted:
            handles, labels = [*handles, quoted[0]], [*labels, "printed in the paper"]
        axes.set(ylabel=up)
        axes.set_xticks(range(len(groups)), [_breakable(group) for group in groups], fontsize=9)
        finish(figure, handles, labels, title)
        return svg(figure)


def _breakable(name: str) -> str:
    """Break a long name at a dot or a dash."""
    return name if len(name) <= 16 else name.replace(".", "\n.").replace("-", "\n-", 1)


def matrices(drawn: Mapping[str, Matrix], across: str, title: str) -> str:
    """Draw named matrices side by side on one color scale, with numbers if there is room."""
    size = max(map(len, drawn.values()))
    side = max(2.6, 1.0 + 0.36 * size)
    top = max(max(map(max, values)) for values in drawn.values()) or 1.0
    with canvas(side * len(drawn) + 0.4, side + 0.5) as figure:
        for place, (label, values) in enumerate(drawn.items(), start=1):
            axes = figure.add_subplot(1, len(drawn), place)
            squares(axes, values, top, 0, _short if size <= 12 else lambda _: "", fontsize=7)
            ticks = range(0, len(values), max(1, size // 10))
            axes.set(xlabel=across, xticks=ticks, yticks=ticks)
            axes.set_title(label, fontsize=10).set_parse_math(False)
        figure.suptitle(title, fontsize=11)
        return svg(figure)


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 1 else f"{value:.3g}"


def plane(surface: Surface | None, spots: Sequence[Spot], trails: Sequence[Trail], title: str = "") -> str:
    """Draw a plane of weights: values as filled contours, named points, and trajectories."""
    with canvas(5.6, 4.6) as figure:
        axes = figure.add_subplot()
        if surface is not None:
            filled = axes.contourf(surface.xs, surface.ys, surface.values, levels=14, cmap=COLORMAP)
            bar = figure.colorbar(filled, ax=axes, shrink=0.85)
            bar.set_label(surface.label)
            bar.outline.set_visible(False)
        handles = [_trail(axes, trail, place, surface is not None) for place, trail in enumerate(trails)]
        for spot in spots:
            axes.plot(spot.x, spot.y, "o", color="#ffffff", markeredgecolor=INK, markersize=7)
            name(axes, spot.label, (spot.x, spot.y))
        axes.set(xlabel="Distance along the first axis", ylabel="Distance along the second axis")
        axes.set_aspect("equal", adjustable="datalim" if surface is None else "box")
        finish(figure, handles, [trail.label for trail in trails], title)
        return svg(figure)


def _trail(axes: Any, trail: Trail, place: int, light: bool) -> Any:
    color = SERIES[(place + 1) % len(SERIES)]
    for start, end in trail.steps:
        how = {"arrowstyle": "->", "color": color, "linewidth": 0.9, "linestyle": ":"}
        axes.annotate("", end, start, arrowprops=how)
    xs, ys = zip(*trail.points, strict=True)
    if light:  # a white outline, visible on every color
        axes.plot(xs, ys, color="#ffffff", linewidth=3.6)
    marker = MARKERS[place % len(MARKERS)]
    (line,) = axes.plot(xs, ys, color=color, marker=marker, markersize=5, linewidth=1.8)
    return line
