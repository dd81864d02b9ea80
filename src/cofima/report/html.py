"""The report as one self-contained HTML page: tables, figures, and every run with its tasks and config."""

import re
import shlex
from collections.abc import Sequence
from html import escape

import yaml

from cofima.report import figure, metrics
from cofima.report.comparison import MEASURES, Comparison, compare
from cofima.report.groups import Group
from cofima.report.render import html, html_page, html_table
from cofima.report.runs import Run
from cofima.report.table import MISSING, Cell, Column, Row, Table

THEME = {color: f"var(--series-{place})" for place, color in enumerate(figure.SERIES)} | {
    figure.INK: "var(--ink)",
    figure.GRID: "var(--grid)",
}
_TASKS = ("Images", "New", "Old", "Seen", "λ", "Trained", "Merged", "Start", "Seconds")
_LEGEND = """
<p class="soft">Images: test images of the task. New, old, seen: accuracy (%) on the task, on those before it,
on both. λ: share of the new weights. Distances of the backbone: trained, from before the task to the end of
training; merged, from before the task to what is kept; start, from the pre-trained weights to what is kept.
</p>"""


def page(runs: Sequence[Run], first: Sequence[Table] = ()) -> str:
    """Return the whole report as one HTML page, with the tables ``first`` before those of the runs."""
    comparisons = compare(runs)
    shown = _unique(comparisons)
    title = f": {comparisons[0].table.title}" if len(comparisons) == 1 else ""
    body = [
        "<h1>cofima report</h1>",
        f'<p class="soft">{_count(len(runs), "run")} in {_count(len(comparisons), "table")}</p>',
        *map(html, first),
        *(html(each.table, _figures(each.groups, n)) for n, each in enumerate(comparisons, start=1)),
        _glossary(shown),
        "<section><h2>Runs</h2>",
        *map(details, shown),
        "</section>",
        "<section><h2>This report again</h2>",
        _block(f"cofima report {shlex.join(dict.fromkeys(str(run.source) for run in shown))}"),
        "</section>",
    ]
    return html_page(f"cofima report{title}", body)


def drawings(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Return the figures of each table as separate SVG files, by file name."""
    found: dict[str, str] = {}
    for number, each in enumerate(comparisons, start=1):
        which = f"-{number}" if len(comparisons) > 1 else ""
        drawn = {"accuracy": figure.accuracy(each.groups), "distance": figure.distance(each.groups)}
        found |= {f"{name}{which}.svg": svg for name, svg in drawn.items() if svg is not None}
    return found


def details(run: Run) -> str:
    """Return one run as a collapsible box: tasks, notes, config and the command to repeat it."""
    title = f"{run.label}, seed {run.seed}: {run.state}{'' if run.finished else ' so far'}"
    versions = ", ".join(f"{name} {version}" for name, version in run.record.versions.items())
    parts = [
        f'<p class="soft">Folder <code>{escape(str(run.folder))}</code></p>',
        _tasks(run),
        _notes(run),
        _backbone(run),
        "<h3>Config</h3>",
        _block(config_yaml(run)),
        "<h3>Repeat</h3>",
        "<p>Save the config above as <code>config.yaml</code>, then run:</p>",
        _block("cofima run config.yaml --out runs/again"),
        f'<p class="soft">Made with {escape(versions)}.</p>' if versions else "",
    ]
    inside = "\n".join(part for part in parts if part)
    return f'<details><summary>{escape(title)}</summary><div class="inside">\n{inside}\n</div></details>'


def config_yaml(run: Run) -> str:
    """Return the config as a runnable file; ``stream`` keeps only the way of splitting that was used."""
    stream = run.config.get("stream")
    if isinstance(stream, dict) and stream.get("groups") is not None:
        stream = {"groups": stream["groups"]}
    config = run.config | ({"stream": stream} if stream else {})
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _figures(groups: Sequence[Group], number: int) -> str:
    band = "; the band is one standard deviation over seeds" if any(len(g.runs) > 1 for g in groups) else ""
    dashed = "; dashed: all classes learned at once" if any(group.all_at_once for group in groups) else ""
    wide = [
        _figure(
            figure.accuracy(groups),
            f"t{number}a",
            "Accuracy on all classes seen, after each task" + band + dashed,
        ),
        _figure(
            figure.distance(groups),
            f"t{number}d",
            "Distance of the backbone from its pre-trained weights, after each task" + band,
        ),
    ]
    small = [
        _figure(figure.matrix(g), f"t{number}m{place}", f"{g.label}: accuracy on each task, after each task")
        for place, g in enumerate(groups)
    ]
    least = 20 if any(len(group.runs[0].history) > 8 for group in groups) else 14
    return "\n".join(
        f'<div class="figures" style="--least: {width}rem">{"".join(drawn)}</div>'
        for width, drawn in ((24, wide), (least, small))
    )


def _figure(svg: str | None, name: str, caption: str) -> str:
    """Embed a figure: in the theme's colors, with unique ids, and with a text alternative."""
    if svg is None:
        return ""
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
    svg = re.sub(r"(fill|stroke): (#\w{6})", lambda m: f"{m[1]}: {THEME.get(m[2], m[2])}", svg)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if size is None:
        raise ValueError("a figure has no viewBox")
    width = 1.5 * float(size[1])  # a point is 4/3 pixels; more would fill the page with huge letters
    start = f'<svg {size[0]} role="img" aria-label="{escape(caption)}" style="max-width: {width:.0f}px">'
    svg = start + svg[svg.index(">") + 1 :]
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>\n"


def _glossary(runs: Sequence[Run]) -> str:
    bound = "All classes learned at once from all images: the upper bound, never marked as best."
    pairs = {measure.title: measure.meaning for measure in MEASURES}
    pairs["n"] = "Number of runs, which differ in their seed only."
    pairs |= {run.label: bound for run in runs if run.all_at_once}
    pairs["Bold"] = "The best finished method of the column."
    items = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs.items())
    return f"<section><h2>What the numbers mean</h2>\n<dl>\n{items}\n</dl></section>"


def _tasks(run: Run) -> str:
    if not run.history:
        return "<p>No task is finished yet.</p>"
    columns = [Column("Task"), Column("Classes", "left"), *map(Column, _TASKS)]
    rows = [Row(_task(run, t)) for t in range(len(run.history))]
    return html_table(Table(f"Tasks of {run.label}, seed {run.seed}", columns, rows, style="tasks")) + _LEGEND


def _task(run: Run, t: int) -> list[Cell]:
    step = run.history[t]
    old, new = metrics.old_new(run.matrix, run.sizes)[t]
    seen = metrics.accuracies_over_time(run.matrix, run.sizes)[t]
    lam = _number(step.lam, 3)
    moves = [_number(d, 3) for d in (step.distance.trained, step.distance.merged, step.distance.from_start)]
    shown = [str(step.task), ", ".join(step.classes), str(step.sizes[-1])]
    shown += [*(_number(value, 2) for value in (new, old, seen)), lam, *moves, _number(run.seconds[t], 1)]
    return [Cell(text) for text in shown]


def _backbone(run: Run) -> str:
    """List the facts that identify the backbone; preprocessing is part of the config."""
    kept = run.record.backbone
    shown = ("name", "alias", "tag", "sha256", "pretraining", "overlap", "layout", "final_norm")
    items = "".join(f"<dt>{key}</dt><dd>{escape(str(kept[key]))}</dd>" for key in shown if kept.get(key))
    return f"<h3>Backbone</h3><dl>{items}</dl>" if items else ""


def _notes(run: Run) -> str:
    notes = [f"Task {step.task}: {note}" for step in run.history for note in step.notes]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h3>Notes</h3><ul>{items}</ul>" if notes else ""


def _block(text: str) -> str:
    """Return preformatted text in a box that scrolls by itself."""
    return f'<pre tabindex="0">{escape(text.strip())}</pre>'


def _number(value: float | None, decimals: int) -> str:
    return MISSING if value is None else f"{value:.{decimals}f}"


def _unique(comparisons: Sequence[Comparison]) -> list[Run]:
    """Return the runs in the order of the tables, each once (a bound may be in several tables)."""
    return list({run.folder: run for each in comparisons for g in each.groups for run in g.runs}.values())


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"
