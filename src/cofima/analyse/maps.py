"""Figures of matrices and of planes, in the manner of a report's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cofima.report.figure import INK, MARKERS, SERIES, style, svg

COLOURS = "cividis"


@dataclass(frozen=True)
class Matrix:
    """A named square of numbers."""

    label: str
    values: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Spot:
    """A named place in a plane."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Trail:
    """A named way through a plane; ``steps`` are the two ends of arrows beside it."""

    label: str
    points: Sequence[tuple[float, float]]
    steps: Sequence[tuple[tuple[float, float], tuple[float, float]]] = ()


@dataclass(frozen=True)
class Relief:
    """Values over a grid in a plane: ``values[row][column]`` at ``ys[row]``, ``xs[column]``."""

    xs: Sequence[float]
    ys: Sequence[float]
    values: Sequence[Sequence[float]]
    label: str


def matrices(drawn: Sequence[Matrix], across: str, title: str) -> str:
    """Draw squares side by side, coloured on one scale, each number in its place where there is room."""
    size = max(len(each.values) for each in drawn)
    side = max(2.6, 1.0 + 0.36 * size)
    top = max(max(map(max, each.values)) for each in drawn) or 1.0
    colours = matplotlib.colormaps[COLOURS]
    with style():
        figure = Figure(figsize=(side * len(drawn) + 0.4, side + 0.5), layout="constrained")
        for place, each in enumerate(drawn, start=1):
            axes = figure.add_subplot(1, len(drawn), place)
            for row, values in enumerate(each.values):
                for column, value in enumerate(values):
                    corner = (column - 0.47, row - 0.47)
                    axes.add_patch(Rectangle(corner, 0.94, 0.94, color=colours(value / top)))
                    shade = "#ffffff" if value < 0.45 * top else "#000000"
                    if size <= 12:
                        axes.text(
                            column, row, _short(value), ha="center", va="center", color=shade, fontsize=7
                        )
            span, ticks = (-0.5, len(each.values) - 0.5), range(0, len(each.values), max(1, size // 10))
            axes.set(xlabel=across, xlim=span, ylim=span[::-1], aspect="equal", xticks=ticks, yticks=ticks)
            axes.set_title(each.label, fontsize=10).set_parse_math(False)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
        figure.suptitle(title, fontsize=11)
        return svg(figure)


def plane(relief: Relief | None, spots: Sequence[Spot], trails: Sequence[Trail], title: str = "") -> str:
    """Draw a plane of weights: values as filled contours, named spots, and ways from spot to spot."""
    with style():
        figure = Figure(figsize=(5.6, 4.6), layout="constrained")
        axes = figure.add_subplot()
        if relief is not None:
            filled = axes.contourf(relief.xs, relief.ys, relief.values, levels=14, cmap=COLOURS)
            bar = figure.colorbar(filled, ax=axes, shrink=0.85)
            bar.set_label(relief.label)
            bar.outline.set_visible(False)
        handles = [_trail(axes, trail, place, relief is not None) for place, trail in enumerate(trails)]
        for spot in spots:
            _spot(axes, spot)
        axes.set(xlabel="Distance along the first axis", ylabel="Distance along the second axis")
        axes.set_aspect("equal", adjustable="datalim" if relief is None else "box")
        if title:
            axes.set_title(title, fontsize=10).set_parse_math(False)
        if trails:
            labels = [trail.label for trail in trails]
            figure.legend(handles, labels, loc="outside lower center", ncols=1, frameon=False, fontsize=10)
        return svg(figure)


def _spot(axes: Any, spot: Spot) -> None:
    axes.plot(spot.x, spot.y, "o", color="#ffffff", markeredgecolor=INK, markersize=7)
    text = axes.annotate(spot.label, (spot.x, spot.y), (6, 5), textcoords="offset points", fontsize=10)
    text.set_bbox({"facecolor": "#ffffff", "alpha": 0.75, "edgecolor": "none", "pad": 1})


def _trail(axes: Any, trail: Trail, place: int, light: bool) -> Any:
    colour = SERIES[(place + 1) % len(SERIES)]
    for start, end in trail.steps:
        how = {"arrowstyle": "->", "color": colour, "linewidth": 0.9, "linestyle": ":"}
        axes.annotate("", end, start, arrowprops=how)
    xs, ys = zip(*trail.points, strict=True)
    if light:  # a white rim, seen on every colour
        axes.plot(xs, ys, color="#ffffff", linewidth=3.6)
    marker = MARKERS[place % len(MARKERS)]
    (line,) = axes.plot(xs, ys, color=colour, marker=marker, markersize=5, linewidth=1.8)
    return line


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 1 else f"{value:.3g}"
