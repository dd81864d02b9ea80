"""Figures of curves and of bars, in the manner of a report's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

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
    colour: int | None = None


@dataclass(frozen=True)
class Mark:
    """A named place on the horizontal axis."""

    x: float
    label: str


@dataclass(frozen=True)
class Bars:
    """A named bar in each group; None leaves the place empty."""

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
    """Draw curves over one axis; ``ticks`` name the places 0, 1, ... where they are not numbers."""
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
            colour = SERIES[place % len(SERIES)]
            handles.append(axes.bar(*_columns(known), width=0.9 * wide, color=colour))
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
    number = place if curve.colour is None else curve.colour
    colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
    dash = DASHES[1] if curve.dashed else DASHES[number // len(SERIES) % len(DASHES)]
    if any(curve.spread):
        low, high = ([y + sign * s for y, s in zip(curve.y, curve.spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(curve.x, low, high, color=colour, alpha=0.18, linewidth=0)
    (line,) = axes.plot(
        curve.x, curve.y, color=colour, linestyle=dash, marker=marker, markersize=4, linewidth=1.8
    )
    if curve.best is not None:
        axes.plot(
            curve.x[curve.best],
            curve.y[curve.best],
            "o",
            markersize=12,
            markerfacecolor="none",
            markeredgecolor=colour,
            markeredgewidth=1.6,
        )
    return line


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [height for _, height in pairs]


def _breakable(name: str) -> str:
    """Break a long name where it has a dot or a dash."""
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
