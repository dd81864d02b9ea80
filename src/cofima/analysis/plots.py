"""Figures of analyses, in the style of reports: curves, bars, matrices and planes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cofima.report.figure import DASHES, GRID, INK, MARKERS, SERIES, style, svg

CROWDED = 16  # bars: more of them have no room for their numbers


@dataclass(frozen=True)
class Curve:
    """A named line through points; ``spread`` is drawn as a band, a ``best`` point with a ring."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = ()
    best: int | None = None
    dashed: bool = False
    color: int | None = None


@dataclass(frozen=True)
class Mark:
    """A named position on the horizontal axis."""

    x: float
    label: str


@dataclass(frozen=True)
class Bars:
    """A named bar in each group; None leaves it out."""

    label: str
    heights: Sequence[float | None]
    spread: Sequence[float | None] = ()


def curves(
    drawn: Sequence[Curve],
    across: str,
    up: str,
    title: str = "",
    marks: Sequence[Mark] = (),
    ticks: Sequence[str] = (),
) -> str:
    """Draw curves over one axis; ``ticks`` name the positions 0, 1, ... of categories."""
    with style():
        figure = Figure(figsize=(5.2, 3.4 + 0.23 * -(-len(drawn) // 3)), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        handles = [_curve(axes, curve, place) for place, curve in enumerate(drawn)]
        for mark in marks:
            axes.axvline(mark.x, color=INK, linestyle=(0, (1, 1.5)), linewidth=1)
            text = axes.text(
                mark.x, 0.5, f" {mark.label}", transform=axes.get_xaxis_transform(), fontsize=9, va="center"
            )
            text.set_bbox({"facecolor": "#ffffff", "alpha": 0.75, "edgecolor": "none", "pad": 1})
        axes.set(xlabel=across, ylabel=up)
        if ticks:
            axes.set_xticks(range(len(ticks)), ticks, rotation=60, ha="right", fontsize=8)
        _finish(figure, axes, handles, [curve.label for curve in drawn], title)
        return svg(figure)


def bars(groups: Sequence[str], drawn: Sequence[Bars], up: str, title: str = "") -> str:
    """Draw one bar of each kind side by side in each group, from 0, with the spread over seeds."""
    wide = 0.8 / len(drawn)
    with style():
        figure = Figure(figsize=(min(8.0, max(5.2, 1.6 + 1.1 * len(groups))), 3.8), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        handles = []
        for place, kind in enumerate(drawn):
            at = [group - 0.4 + (place + 0.5) * wide for group in range(len(groups))]
            known = [(x, h) for x, h in zip(at, kind.heights, strict=True) if h is not None]
            color = SERIES[place % len(SERIES)]
            handles.append(
                axes.bar([x for x, _ in known], [h for _, h in known], width=0.9 * wide, color=color)
            )
            for x, height in known if len(groups) * len(drawn) <= CROWDED else []:
                axes.text(x, height, f"{height:.1f}", ha="center", va="bottom", fontsize=8)
            spreads = [(x, h, s) for x, h, s in zip(at, kind.heights, kind.spread, strict=False) if h and s]
            for x, height, spread in spreads:
                axes.plot([x, x], [height - spread, height + spread], color=INK, linewidth=1.2)
        axes.set(ylabel=up)
        names = [_breakable(group) for group in groups]
        axes.set_xticks(range(len(groups)), names, fontsize=9)
        _finish(figure, axes, handles, [kind.label for kind in drawn], title)
        return svg(figure)


def _curve(axes: Any, curve: Curve, place: int) -> Any:
    number = place if curve.color is None else curve.color
    color, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
    dash = DASHES[1] if curve.dashed else DASHES[number // len(SERIES) % len(DASHES)]
    if any(curve.spread):
        low, high = ([y + sign * s for y, s in zip(curve.y, curve.spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(curve.x, low, high, color=color, alpha=0.18, linewidth=0)
    (line,) = axes.plot(
        curve.x, curve.y, color=color, linestyle=dash, marker=marker, markersize=4, linewidth=1.8
    )
    if curve.best is not None:
        axes.plot(
            curve.x[curve.best],
            curve.y[curve.best],
            "o",
            markersize=12,
            markerfacecolor="none",
            markeredgecolor=color,
            markeredgewidth=1.6,
        )
    return line


def _breakable(name: str) -> str:
    """Break a long name at a dot or a dash."""
    return name if len(name) <= 16 else name.replace(".", "\n.").replace("-", "\n-", 1)


def _finish(figure: Any, axes: Any, handles: Sequence[Any], labels: Sequence[str], title: str) -> None:
    if title:
        axes.set_title(title, fontsize=11).set_parse_math(False)
    columns = 3 if max(map(len, labels)) <= 16 else 2 if max(map(len, labels)) <= 26 else 1
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=10
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


COLORMAP = "cividis"


@dataclass(frozen=True)
class Matrix:
    """A named square of numbers."""

    label: str
    values: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Spot:
    """A named point in a plane."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Trail:
    """A named trajectory in a plane; ``steps`` are the two ends of arrows beside it."""

    label: str
    points: Sequence[tuple[float, float]]
    steps: Sequence[tuple[tuple[float, float], tuple[float, float]]] = ()


@dataclass(frozen=True)
class Surface:
    """Values over a grid in a plane: ``values[row][column]`` at ``ys[row]``, ``xs[column]``."""

    xs: Sequence[float]
    ys: Sequence[float]
    values: Sequence[Sequence[float]]
    label: str


def matrices(drawn: Sequence[Matrix], across: str, title: str) -> str:
    """Draw squares side by side, colored on one scale, each number in its place where there is room."""
    size = max(len(each.values) for each in drawn)
    side = max(2.6, 1.0 + 0.36 * size)
    top = max(max(map(max, each.values)) for each in drawn) or 1.0
    colormap = matplotlib.colormaps[COLORMAP]
    with style():
        figure = Figure(figsize=(side * len(drawn) + 0.4, side + 0.5), layout="constrained")
        for place, each in enumerate(drawn, start=1):
            axes = figure.add_subplot(1, len(drawn), place)
            for row, values in enumerate(each.values):
                for column, value in enumerate(values):
                    corner = (column - 0.47, row - 0.47)
                    axes.add_patch(Rectangle(corner, 0.94, 0.94, color=colormap(value / top)))
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


def plane(surface: Surface | None, spots: Sequence[Spot], trails: Sequence[Trail], title: str = "") -> str:
    """Draw a plane of weights: values as filled contours, named points, and trajectories."""
    with style():
        figure = Figure(figsize=(5.6, 4.6), layout="constrained")
        axes = figure.add_subplot()
        if surface is not None:
            filled = axes.contourf(surface.xs, surface.ys, surface.values, levels=14, cmap=COLORMAP)
            bar = figure.colorbar(filled, ax=axes, shrink=0.85)
            bar.set_label(surface.label)
            bar.outline.set_visible(False)
        handles = [_trail(axes, trail, place, surface is not None) for place, trail in enumerate(trails)]
        for spot in spots:
            _spot(axes, spot)
        axes.set(xlabel="Distance along the first axis", ylabel="Distance along the second axis")
        axes.set_aspect("equal", adjustable="datalim" if surface is None else "box")
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
    color = SERIES[(place + 1) % len(SERIES)]
    for start, end in trail.steps:
        how = {"arrowstyle": "->", "color": color, "linewidth": 0.9, "linestyle": ":"}
        axes.annotate("", end, start, arrowprops=how)
    xs, ys = zip(*trail.points, strict=True)
    if light:  # a white rim, visible on every color
        axes.plot(xs, ys, color="#ffffff", linewidth=3.6)
    marker = MARKERS[place % len(MARKERS)]
    (line,) = axes.plot(xs, ys, color=color, marker=marker, markersize=5, linewidth=1.8)
    return line


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 1 else f"{value:.3g}"
