"""Plots in one style, as SVG text: curves and colored squares; the same numbers give the same bytes."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cofima.core.names import printable

# matplotlib is imported only to draw: tables alone do not need to wait for it
if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, distinct under any kind of color vision, without its yellow (too pale for lines).
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, GRID = "#1f2328", "#d0d7de"
COLORMAP = "cividis"
MARKERS = "osD^vPX*"
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
LEVEL = (0, (6, 3))
STYLE = {
    "svg.fonttype": "none",  # keep text as text: searchable, accessible, any script
    "svg.hashsalt": "cofima",
    "text.parse_math": False,  # a name may contain dollar signs
    "font.size": 11,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Curve:
    """A named line through points.

    Attributes:
        label: Label in the legend.
        x: Horizontal positions.
        y: Values.
        spread: Half-width of a band around the line.
        best: Index of a point to mark with a ring.
        dashed: Draw a dashed line.
        color: Index of its color; by default its position among the curves.
        level: Draw only the last value, as a dashed horizontal line.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = ()
    best: int | None = None
    dashed: bool = False
    color: int | None = None
    level: bool = False


def curves(
    drawn: Sequence[Curve],
    across: str,
    up: str,
    title: str = "",
    *,
    mark: float | None = None,
    ticks: Sequence[str] = (),
    **settings: Any,
) -> str:
    """Draw curves over one axis.

    Args:
        drawn: The curves.
        across: Label of the horizontal axis.
        up: Label of the vertical axis.
        title: Title of the figure.
        mark: Position to mark as the λ of the run.
        ticks: Names of the categories at the positions 0, 1, ...
        settings: Additional properties of the axes.
    """
    labels = [_cut(curve.label) for curve in drawn]
    with canvas(5.0, 3.3 + 0.23 * -(-len(labels) // _columns(labels))) as figure:
        axes = figure.add_subplot()
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        handles = [_curve(axes, curve, place) for place, curve in enumerate(drawn)]
        axes.set(xlabel=across, ylabel=up, **settings)
        if mark is not None:
            axes.axvline(mark, color=INK, linestyle=(0, (1, 1.5)), linewidth=1)
            name(axes, "λ of the run", (mark, 0.5), axes.get_xaxis_transform())
        if ticks:
            axes.set_xticks(range(len(ticks)), ticks, rotation=60, ha="right", fontsize=8)
        finish(figure, handles, labels, title)
        return svg(figure)


def _curve(axes: Any, curve: Curve, place: int) -> Any:
    """Draw one curve and return its legend handle."""
    if curve.level:
        level = curve.y[-1] if curve.y else float("nan")
        return axes.axhline(level, color=INK, linestyle=LEVEL, linewidth=1.5)
    number = place if curve.color is None else curve.color
    color, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
    dash = DASHES[1] if curve.dashed else DASHES[number // len(SERIES) % len(DASHES)]
    if any(curve.spread):
        low, high = ([y + sign * s for y, s in zip(curve.y, curve.spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(curve.x, low, high, color=color, alpha=0.18, linewidth=0)
    (line,) = axes.plot(
        curve.x, curve.y, color=color, linestyle=dash, marker=marker, markersize=4.5, linewidth=1.8
    )
    if curve.best is not None:
        at = curve.x[curve.best], curve.y[curve.best]
        axes.plot(*at, "o", markersize=12, markerfacecolor="none", markeredgecolor=color, markeredgewidth=1.6)
    return line


def squares(
    axes: Any,
    values: Sequence[Sequence[float]],
    top: float,
    first: int,
    shown: Callable[[float], str],
    fontsize: int = 9,
) -> None:
    """Draw rows of numbers from 0 to ``top`` as colored squares, with both axes starting at ``first``."""
    import matplotlib
    from matplotlib.patches import Rectangle

    colors = matplotlib.colormaps[COLORMAP]
    for y, row in enumerate(values, start=first):
        for x, value in enumerate(row, start=first):
            axes.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, color=colors(value / top)))
            shade = "#ffffff" if value < 0.45 * top else "#000000"
            axes.text(x, y, shown(value), ha="center", va="center", color=shade, fontsize=fontsize)
    span = (first - 0.5, first + len(values) - 0.5)
    axes.set(xlim=span, ylim=span[::-1], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def name(axes: Any, label: str, at: tuple[float, float], coordinates: Any = "data") -> None:
    """Write a name next to a point, readable on any color."""
    text = axes.annotate(label, at, (6, 5), coordinates, "offset points", fontsize=10)
    text.set_bbox({"facecolor": "#ffffff", "alpha": 0.75, "edgecolor": "none", "pad": 1})


def finish(figure: "Figure", handles: Sequence[Any], labels: Sequence[str], title: str = "") -> None:
    """Add the title, and the legend below; dollar signs are not parsed as math."""
    texts = [figure.axes[0].set_title(title, fontsize=11)] if title else []
    if handles:
        below = {"loc": "outside lower center", "ncols": _columns(labels), "frameon": False, "fontsize": 11}
        texts += figure.legend(handles, labels, **below).get_texts()
    for text in texts:
        text.set_parse_math(False)


def _columns(labels: Sequence[str]) -> int:
    longest = max(map(len, labels))
    return 3 if longest <= 12 else 2 if longest <= 22 else 1


def _cut(label: str) -> str:
    """Shorten a legend label; matplotlib would drop one that starts with an underscore."""
    text = label if len(label) <= 48 else f"{label[:47]}…"
    return f"\u200b{text}" if text.startswith("_") else text


@contextmanager
def canvas(width: float, height: float) -> Iterator["Figure"]:
    """Yield a figure in our style, independent of the user's settings, which are restored afterwards."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield Figure(figsize=(width, height), layout="constrained")


def svg(figure: "Figure") -> str:
    """Return the figure as an SVG element, without date and program version, so that it is reproducible."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None})
    text = printable(out.getvalue())  # XML has no control characters
    return text[text.index("<svg") :]  # without the XML declaration, so that it can be embedded in HTML
