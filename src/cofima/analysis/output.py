"""What an analysis leaves: figures and a CSV file with unrounded numbers."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cofima.core.atomic import write_text
from cofima.core.errors import CofimaError

Row = Mapping[str, Any]


@dataclass
class Result:
    """Rows of numbers, figures by their name, and what they say in a line or a few."""

    name: str
    rows: Sequence[Row]
    figures: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> list[Path]:
        """Write everything into a folder, each file at once or not at all."""
        ready(folder)
        files = {f"{self.name}.csv": csv_text(self.rows)}
        files |= {f"{name}.svg": _on_white(svg) for name, svg in self.figures.items()}
        for name, text in files.items():
            write_text(folder / name, text)
        return [folder / name for name in files]


def ready(folder: Path) -> None:
    """Make a folder for results, or say why it cannot be; called before any work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CofimaError(f"--out {folder}: cannot be made ({error.strerror})") from error


def csv_text(rows: Sequence[Row]) -> str:
    """Return rows as CSV; numbers are written so that reading them gives the same bits."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _on_white(svg: str) -> str:
    """Put a white sheet behind a figure: dark letters can then be read on a dark page too."""
    start = svg.index(">") + 1
    return f'{svg[:start]}\n <rect width="100%" height="100%" fill="#ffffff"/>{svg[start:]}'
