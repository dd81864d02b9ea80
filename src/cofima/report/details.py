"""What a page says about one run: its tasks, its notes, its config and how to repeat it."""

from html import escape

import yaml

from cofima.report import metrics
from cofima.report.runs import Run
from cofima.report.table import MISSING

HEAD = ("Task", "Classes", "Images", "New", "Old", "Seen", "λ", "Trained", "Merged", "Start", "Seconds")
LEGEND = """
<p class="soft">Images: test images of the task. New, old, seen: accuracy (%) on the task, on those before it,
on both. λ: share of the new weights. Distances of the backbone: trained, from before the task to the end of
training; merged, from before the task to what is kept; start, from the pre-trained weights to what is kept.
</p>"""


def details(run: Run) -> str:
    """Return one run as a box that opens."""
    title = f"{run.label}, seed {run.seed}: {run.state}{'' if run.finished else ' so far'}"
    parts = [f'<p class="soft">Folder <code>{escape(str(run.folder))}</code></p>', _tasks(run), _notes(run)]
    parts += [_backbone(run)]
    parts += ["<h3>Config</h3>", block(_yaml(run))]
    parts += ["<h3>Repeat</h3>", "<p>Save the config above as <code>config.yaml</code>, then run:</p>"]
    parts += [block("cofima run config.yaml --out runs/again")]
    versions = ", ".join(f"{name} {version}" for name, version in run.setup.versions.items())
    parts += [f'<p class="soft">Made with {escape(versions)}.</p>' if versions else ""]
    inside = "\n".join(part for part in parts if part)
    return f'<details><summary>{escape(title)}</summary><div class="inside">\n{inside}\n</div></details>'


def block(text: str) -> str:
    """Return text as it is typed or stored, in a box that scrolls by itself."""
    return f'<pre tabindex="0">{escape(text.strip())}</pre>'


def scroll(table: str, name: str) -> str:
    """Put a table into a box that scrolls sideways, also by keyboard, so that the page never does."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">{table}</div>'


def _yaml(run: Run) -> str:
    """Return the config as a file that can be run: of the two ways to deal classes, the one that was used."""
    stream = run.config.get("stream")
    if isinstance(stream, dict) and stream.get("groups") is not None:
        stream = {"groups": stream["groups"]}
    config = run.config | ({"stream": stream} if stream else {})
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _tasks(run: Run) -> str:
    if not run.history:
        return "<p>No task is finished yet.</p>"
    head = "".join(f'<th scope="col">{name}</th>' for name in HEAD)
    body = "\n".join(_task(run, t) for t in range(len(run.history)))
    table = f"<table class='tasks'><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return scroll(table, f"Tasks of {run.label}, seed {run.seed}") + LEGEND


def _task(run: Run, t: int) -> str:
    step = run.history[t]
    old, new = metrics.old_new(run.matrix, run.sizes)[t]
    seen = metrics.accuracies_over_time(run.matrix, run.sizes)[t]
    lam = step.lam if isinstance(step.lam, str) else _number(step.lam, 3)
    moves = [_number(d, 3) for d in (step.distance.trained, step.distance.merged, step.distance.from_start)]
    cells = [_number(step.sizes[-1], 0), _number(new, 2), _number(old, 2), _number(seen, 2), lam, *moves]
    numbers = "".join(f"<td>{escape(cell)}</td>" for cell in [*cells, _number(run.seconds[t], 1)])
    classes = escape(", ".join(step.classes))
    return f'<tr><th scope="row">{step.task}</th><td class="text">{classes}</td>{numbers}</tr>'


def _backbone(run: Run) -> str:
    """List what identifies the backbone; pixels and colours stand in the config of the preparation."""
    kept = run.setup.backbone
    shown = ("name", "alias", "tag", "sha256", "pretraining", "overlap", "layout", "final_norm")
    items = "".join(f"<dt>{key}</dt><dd>{escape(str(kept[key]))}</dd>" for key in shown if kept.get(key))
    return f"<h3>Backbone</h3><dl>{items}</dl>" if items else ""


def _notes(run: Run) -> str:
    notes = [f"Task {step.task}: {note}" for step in run.history for note in step.notes]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h3>Notes</h3><ul>{items}</ul>" if notes else ""


def _number(value: float | None, decimals: int) -> str:
    return MISSING if value is None else f"{value:.{decimals}f}"
