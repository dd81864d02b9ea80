"""The history of a model as a table, for the command line, the model card and the web page."""

from collections.abc import Sequence

from cofima.core.wording import some
from cofima.report.table import Cell, Column, Row, Table
from cofima.store.history import HistoryRow

TITLES = ("", "what", "classes", "images", "accuracy %", "old classes %", "lam", "date")
TEXTS = ("", "what", "classes", "date")


def history_table(rows: Sequence[HistoryRow]) -> Table:
    """Return a table with one row per change: classes, number of images, accuracy, date."""
    lines = [[str(number), *_texts(row)] for number, row in enumerate(rows, start=1)]
    columns = [Column(title, "left" if title in TEXTS else "right") for title in TITLES]
    notes = [f"Merge {at}: {'; '.join(row.notes)}." for at, row in enumerate(rows, 1) if row.kind == "merge"]
    if any(_partly(row) for row in rows):
        notes.append("* on images of a part of its classes only.")
    return Table("History", columns, [Row([Cell(text) for text in line]) for line in lines], " ".join(notes))


def features_kept(rows: Sequence[HistoryRow]) -> int:
    """Return of how many images features are kept in the folder, after the last change."""
    return next((row.kept_features for row in reversed(rows) if row.kept_features is not None), 0)


def _partly(row: HistoryRow) -> bool:
    """Return True if some tasks were measured, and others were not."""
    return row.overall is not None and None in row.accuracy


def _texts(row: HistoryRow) -> list[str]:
    overall, old = row.overall, row.old
    renamed = row.kind == "rename"
    return [
        row.kind,
        " -> ".join(row.classes) if renamed else f"{len(row.classes)}: {some(row.classes, 4)}",
        "" if row.train_images is None else str(row.train_images),
        "" if overall is None else f"{overall:.1f}{'*' if _partly(row) else ''}",
        "" if old is None else f"{'' if old.measured else '~'}{old.before:.1f} -> {old.after:.1f}",
        "" if row.lam is None else f"{row.lam:.2f}",
        row.date[:16].replace("T", " "),
    ]
