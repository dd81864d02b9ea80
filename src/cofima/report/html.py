"""The report as a self-contained HTML page: tables, figures, and each run with tasks and configuration."""

import re
import shlex
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

import yaml

from cofima.report import drawing, figure, metrics
from cofima.report.comparison import MEASURES, Comparison, compare
from cofima.report.groups import Group
from cofima.report.render import html
from cofima.report.runs import Run
from cofima.report.table import MISSING, Cell, Column, Row, Table

if TYPE_CHECKING:
    from markupsafe import Markup

THEME = {color: f"var(--series-{place})" for place, color in enumerate(drawing.SERIES)} | {
    drawing.INK: "var(--ink)",
    drawing.GRID: "var(--grid)",
}
_TASKS = ("Images", "New", "Old", "Seen", "λ", "Trained", "Merged", "Start", "Seconds")


def page(runs: Sequence[Run], first: Sequence[Table] = ()) -> str:
    """Return the report as one HTML page, with the tables ``first`` before those of the runs."""
    comparisons = compare(runs)
    # in the order of the tables, without duplicates: an upper bound may be in several tables
    shown = {run.folder: run for each in comparisons for g in each.groups for run in g.runs}.values()
    title = f": {comparisons[0].table.title}" if len(comparisons) == 1 else ""
    return html(
        "cofima.report",
        "report.html",
        title=f"cofima report{title}",
        found=len(runs),
        first=first,
        comparisons=comparisons,
        measures=MEASURES,
        runs=list(shown),
        command=f"cofima report {shlex.join(dict.fromkeys(str(run.source) for run in shown))}",
        figures=_figures,
        tasks=_tasks,
        config_yaml=config_yaml,
    )


def drawings(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Return the figures of each table as separate SVG files, by file name."""
    found: dict[str, str] = {}
    for number, each in enumerate(comparisons, start=1):
        which = f"-{number}" if len(comparisons) > 1 else ""
        drawn = {"accuracy": figure.accuracy(each.groups), "distance": figure.distance(each.groups)}
        found |= {f"{name}{which}.svg": svg for name, svg in drawn.items() if svg is not None}
    return found


def config_yaml(run: Run) -> str:
    """Return the configuration as a runnable file; of ``stream``, only the settings used are kept."""
    stream = run.config.get("stream")
    if isinstance(stream, dict) and stream.get("groups") is not None:
        stream = {"groups": stream["groups"]}
    config = run.config | ({"stream": stream} if stream else {})
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _figures(groups: Sequence[Group], number: int) -> Iterator[tuple[int, list[tuple["Markup", str]]]]:
    """Yield two rows of figures with captions, each row with the minimum width of a figure (in rem)."""
    band = "; the band is one standard deviation over seeds" if any(len(g.runs) > 1 for g in groups) else ""
    dashed = "; dashed: all classes learned at once" if any(group.all_at_once for group in groups) else ""
    wide = [
        (figure.accuracy(groups), f"Accuracy on all classes seen, after each task{band}{dashed}"),
        (
            figure.distance(groups),
            f"Distance of the backbone from its pre-trained weights, after each task{band}",
        ),
    ]
    small = [(figure.matrix(g), f"{g.label}: accuracy on each task, after each task") for g in groups]
    least = 20 if any(len(group.runs[0].history) > 8 for group in groups) else 14
    for width, row, drawn in ((24, "w", wide), (least, "m", small)):
        pairs = enumerate(drawn)
        yield width, [(_embed(svg, f"t{number}{row}{n}", text), text) for n, (svg, text) in pairs if svg]


def _embed(svg: str, name: str, caption: str) -> "Markup":
    """Return a figure in the theme's colors, with unique IDs and a text alternative."""
    from markupsafe import Markup

    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
    svg = re.sub(r"(fill|stroke): (#\w{6})", lambda m: f"{m[1]}: {THEME.get(m[2], m[2])}", svg)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if size is None:
        raise ValueError("a figure has no viewBox")
    width = 1.5 * float(size[1])  # a point is 4/3 pixels; without a limit, wide pages would have huge letters
    start = f'<svg {size[0]} role="img" aria-label="{escape(caption)}" style="max-width: {width:.0f}px">'
    return Markup(start + svg[svg.index(">") + 1 :])


def _tasks(run: Run) -> Table:
    columns = [Column("Task"), Column("Classes", "left"), *map(Column, _TASKS)]
    rows = [Row(_task(run, t)) for t in range(len(run.history))]
    return Table(f"Tasks of {run.label}, seed {run.seed}", columns, rows, style="tasks")


def _task(run: Run, t: int) -> list[Cell]:
    step = run.history[t]
    old, new = metrics.old_new(run.matrix, run.sizes)[t]
    seen = metrics.accuracies_over_time(run.matrix, run.sizes)[t]
    lam = _number(step.lam, 3)
    moves = [_number(d, 3) for d in (step.distance.trained, step.distance.merged, step.distance.from_start)]
    shown = [str(step.task), ", ".join(step.classes), str(step.sizes[-1])]
    shown += [*(_number(value, 2) for value in (new, old, seen)), lam, *moves, _number(run.seconds[t], 1)]
    return [Cell(text) for text in shown]


def _number(value: float | None, decimals: int) -> str:
    return MISSING if value is None else f"{value:.{decimals}f}"
