"""Base class of trackers, and the names of the metrics that they log."""

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from cofima.core.errors import CofimaError
from cofima.experiment.metrics_log import LogLine


class Tracker(ABC):
    """A listener that forwards the lines of metrics.jsonl to a tracking tool.

    It opens with the first line, so that a run that fails earlier leaves nothing behind. A resumed run sends
    all its lines again; tools that append skip those that they already have.

    Attributes:
        sent: Number of lines received so far.
        known: Number of lines that the tool has from an earlier process.
    """

    def __init__(self, folder: Path, config: dict[str, Any], where: str) -> None:
        self.folder, self.config, self.where = folder, config, where
        self.sent = self.known = 0
        self.is_open = False

    def __call__(self, line: LogLine) -> None:
        """Forward a line, unless the tool already has it."""
        self.sent += 1  # even if the tool cannot be opened
        if not self.is_open:
            self.open(line)
            self.is_open = True
        if self.sent > self.known:
            self.log(line, scalars(line))

    def close(self) -> None:
        """Finish the run in the tool, if it was opened."""
        if self.is_open:
            self.finish()
            self.is_open = False

    @abstractmethod
    def open(self, first: LogLine) -> None:
        """Create or resume the run in the tool."""

    @abstractmethod
    def log(self, line: LogLine, numbers: dict[str, float]) -> None:
        """Log the metrics of a line at its step."""

    @abstractmethod
    def finish(self) -> None:
        """Mark the run as finished."""

    def place(self, *names: str) -> Path:
        """Return a path below ``trackers`` in the run's folder; raise if it contains a symbolic link."""
        path = self.folder
        for name in ("trackers", *names):
            path = path / name
            if path.is_symlink():
                raise CofimaError(f"{path} is a symbolic link, and nothing is written through links")
        return path

    def run_id(self, first: LogLine) -> str:
        """Return an ID that stays the same when the run is resumed."""
        return hashlib.sha256(f"{self.folder.name} {first['time']}".encode()).hexdigest()[:16]


def scalars(line: LogLine) -> dict[str, float]:
    """Return the metrics of a line, named ``group/name``."""
    if line["kind"] == "epoch":
        found = {f"train/{key}": line.get(key) for key in ("loss", "lr", "backbone_lr")}
        found["seconds/epoch"] = line.get("seconds")
    else:
        found = {"accuracy/seen": line.get("seen"), "merge/lam": line.get("lam"), "task": line["task"]}
        found |= {f"accuracy/task_{place}": value for place, value in enumerate(line.get("accuracy", []), 1)}
        found |= {f"distance/{name}": value for name, value in line.get("distance", {}).items()}
        found |= {f"seconds/{name}": value for name, value in line.get("seconds", {}).items()}
        found |= {f"memory/{name}": line.get(name) for name in ("peak_memory_mb", "state_bytes")}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
