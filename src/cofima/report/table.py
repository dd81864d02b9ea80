"""The table model, from which all formats are rendered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """Header of a column.

    Attributes:
        title: Title of the column.
        align: Alignment of its cells.
        over: Spanning header above this column and its neighbors with the same one.
        marks: Footnote marks of the spanning header.
        number: True if every cell is a number, typeset in math mode.
    """

    title: str
    align: Literal["left", "right"] = "right"
    over: str = ""
    marks: str = ""
    number: bool = False


@dataclass(frozen=True)
class Cell:
    """A text, or a number with its standard deviation and the number of averaged values."""

    text: str
    spread: str = ""
    count: str = ""
    best: bool = False
    marks: str = ""

    def __str__(self) -> str:
        spread = f" ± {self.spread}" if self.spread else ""
        return f"{self.text}{spread}{f' ({self.count})' if self.count else ''}"


@dataclass(frozen=True)
class Row:
    """One row; ``rule`` draws a line above it, ``quoted`` marks published numbers."""

    cells: Sequence[Cell]
    rule: bool = False
    quoted: bool = False


@dataclass(frozen=True)
class Table:
    """A table with its notes; the first column names the rows.

    Attributes:
        title: Title of the table.
        columns: Headers of the columns.
        rows: The rows.
        note: One paragraph below the table, or in its caption.
        footnotes: A list of notes instead of ``note``.
        records: Rows of the CSV file: unrounded values by name.
        scaled: True to scale it to the width of a printed page.
        style: CSS class.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""
    footnotes: Sequence[str] = ()
    records: Sequence[Mapping[str, object]] = ()
    scaled: bool = False
    style: str = ""

    def filled(self) -> "Table":
        """Return the table without columns that are empty in every row."""
        keep = [at for at in range(len(self.columns)) if any(str(row.cells[at]) for row in self.rows)]
        rows = [replace(row, cells=[row.cells[at] for at in keep]) for row in self.rows]
        return replace(self, columns=[self.columns[at] for at in keep], rows=rows)

    @property
    def heads(self) -> list[tuple[Cell, list[Column]]]:
        """Spanning headers in order, each with the columns below it; blank if there is none."""
        groups = groupby(self.columns, key=lambda column: (column.over, column.marks))
        return [(Cell(over, marks=marks), list(columns)) for (over, marks), columns in groups]
