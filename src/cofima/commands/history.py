"""``cofima history``: what happened to a model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cofima import generations
from cofima.commands.console import out
from cofima.commands.outcome import some
from cofima.history import HistoryRow


def history(model: Annotated[Path, typer.Argument(help="A model folder.")]) -> None:
    """Show what a model learned, when, from how many images, and what was measured."""
    table = Table("", "what", "classes", "images", "accuracy %", "old classes %", "lam", "date")
    for number, row in enumerate(generations.read_history(model), start=1):
        table.add_row(str(number), *_cells(row))
    out.print(table)


def _cells(row: HistoryRow) -> list[str]:
    overall, old = row.overall, row.old
    renamed = row.kind == "rename"
    lost = "" if old is None else f"{'' if old.measured else '~'}{old.before:.1f} -> {old.after:.1f}"
    return [
        row.kind,
        " -> ".join(row.classes) if renamed else f"{len(row.classes)}: {some(row.classes, 4)}",
        "" if row.train_images is None else str(row.train_images),
        "" if overall is None else f"{overall:.1f}",
        lost,
        "" if row.lam is None else f"{row.lam:.2f}",
        row.date[:16].replace("T", " "),
    ]
