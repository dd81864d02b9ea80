"""The footnotes of a table of the paper: whose numbers, what disagrees, which runs stand apart and why."""

from collections.abc import Sequence

from cofima.report.layouts import DATASETS, LAYOUTS
from cofima.report.paper import PaperTable
from cofima.report.published import Disagreement, published

HERE, PAPER = "here", "paper"


def letter(number: int) -> str:
    """Return the mark of a footnote."""
    return "abcdefghijklmnopqrstuvwxyz"[number]


def notes(table: PaperTable, said: Sequence[Disagreement]) -> list[str]:
    """Return the footnotes: whose numbers, what disagrees, which runs stand apart and why."""
    found = [
        f"{HERE}: mean ± standard deviation (n − 1) over seeds, in brackets their number; accuracies in %. "
        f"{PAPER}: {published().paper}, {published().sources[table.layout.key]}. Bold: the best of the "
        "column in each, by its value, without joint training."
    ]
    found = found if table.layout.ranked else [found[0].partition(" Bold:")[0]]
    found += [_facts(table)] if table.entries else ["No run here follows the protocol of this table."]
    found += [f"{letter(number)}: {_said(each)}" for number, each in enumerate(said)]
    if table.repeats:
        found.append(f"{table.repeats} more with a config and seed already in the table: not counted again.")
    if table.elsewhere:
        others = ", ".join(key for key in LAYOUTS if key != table.layout.key)
        found.append(f"{table.elsewhere} of methods without a line in this table are left out ({others}).")
    found += [
        f"Apart: {run.label}, seed {run.seed}, {run.folder}: {'; '.join(why)}." for run, why in table.apart
    ]
    return found


def _said(each: Disagreement) -> str:
    numbers = []
    for place in each.cells:
        if place.value is not None:
            spread = "" if place.std is None else f" ± {place.std:.2f}"
            numbers.append(f"{place.method} {place.dataset} {place.metric} {place.value:.2f}{spread}")
    return f"{each.text}{': ' if numbers else ''}{'; '.join(numbers)} ({each.source})."


def _facts(table: PaperTable) -> str:
    """Say on which images and weights our numbers rest."""
    parts = []
    for dataset in table.layout.datasets:
        runs = [run for entry in table.entries for run in entry.runs.get(dataset, [])]
        if runs:
            data, weights = runs[0].setup.data, dict.fromkeys(r.setup.backbone.get("sha256") for r in runs)
            split = f"{data.get('split_id', 'unknown')} {str(data.get('split_hash', ''))[:12]}".strip()
            hashes = ", ".join(str(sha)[:12] for sha in weights)
            parts.append(f"{DATASETS[dataset]}: split {split}, backbone sha256 {hashes}")
    return f"{HERE} rests on {'; '.join(parts)}."
