"""``cofima history``: what happened to a model."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cofima import generations
from cofima.commands.console import out
from cofima.commands.outcome import some


def history(model: Annotated[Path, typer.Argument(help="A model folder.")]) -> None:
    """Show what a model learned, when, from how many images, and what was measured."""
    table = Table("", "what", "classes", "images", "accuracy %", "old classes %", "lam", "date")
    for number, row in enumerate(generations.read_history(model), start=1):
        table.add_row(str(number), *_cells(row))
    out.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    accuracy, lam, old = row.get("accuracy"), row.get("lam"), row.get("old")
    if isinstance(accuracy, list):  # a run tests each task's own images, after each task
        sizes = row["sizes"]
        accuracy = sum(a * n for a, n in zip(accuracy, sizes, strict=True)) / sum(sizes)
    kind = row.get("kind", "run")
    names = " -> ".join(row["classes"]) if kind == "rename" else some(row["classes"], 4)
    lost = ""
    if old is not None:
        lost = f"{'' if old['measured'] else '~'}{old['before']:.1f} -> {old['after']:.1f}"
    return [
        kind,
        f"{len(row['classes'])}: {names}" if kind != "rename" else names,
        str(row.get("train_images", "")),
        "" if accuracy is None else f"{accuracy:.1f}",
        lost,
        "" if lam is None else f"{lam:.2f}",
        row.get("date", "")[:16].replace("T", " "),
    ]
