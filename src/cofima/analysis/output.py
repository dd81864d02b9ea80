"""Output files of an analysis: figures, and a CSV file of unrounded numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cofima.core.atomic import write_texts
from cofima.core.errors import CofimaError
from cofima.report.render import csv_records


@dataclass
class Result:
    """Result of an analysis: rows of numbers, figures by name, and a summary of a few lines."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    figures: dict[str, str] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> list[Path]:
        """Write all files into a folder, each atomically."""
        ready(folder)
        texts = {f"{self.name}.csv": csv_records(self.rows)}
        texts |= {f"{name}.svg": _on_white(svg) for name, svg in self.figures.items()}
        return write_texts(texts, folder)


def ready(folder: Path) -> None:
    """Create the output folder; called before any work, to fail early."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CofimaError(f"--out {folder}: cannot be created ({error.strerror})") from error


def _on_white(svg: str) -> str:
    """Add a white background to a figure, so that its dark text is readable on a dark page."""
    start = svg.index(">") + 1
    return f'{svg[:start]}\n <rect width="100%" height="100%" fill="#ffffff"/>{svg[start:]}'
