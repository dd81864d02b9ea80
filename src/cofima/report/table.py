"""The table model, which every format is rendered from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """The header of a column.

    Attributes:
        over: A second header, above this one and its neighbors with the same one.
        marks: Footnote marks of the second header.
        number: Every cell is one number, to be set as mathematics.
    """

    title: str
    align: Literal["left", "right"] = "right"
    over: str = ""
    marks: str = ""
    number: bool = False


@dataclass(frozen=True)
class Cell:
    """A text, or a number with its standard deviation and the number of values averaged."""

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
        note: One paragraph below the table, or in its caption.
        footnotes: A list of notes instead.
        records: The rows of the CSV file: unrounded values by name.
        scaled: Scale down to the width of a printed page.
        style: The CSS class.
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
        """Return the second headers in order, each with the columns below it; blank where there is none."""
        groups = groupby(self.columns, key=lambda column: (column.over, column.marks))
        return [(Cell(over, marks=marks), list(columns)) for (over, marks), columns in groups]
