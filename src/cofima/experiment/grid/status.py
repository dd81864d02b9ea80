"""How far every cell of a grid is, as its folder says: whoever runs it, the disk knows."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Literal

from cofima.core.errors import CofimaError
from cofima.experiment.grid.shared_first_task import NOTE
from cofima.experiment.grid.worker import LOG
from cofima.store import model_folder
from cofima.store.model_folder import Generation

State = Literal["waiting", "running", "done", "failed"]


@dataclass
class Row:
    """One folder that is being learned, as a person looks at it.

    Attributes:
        counts: Whether it is a cell of the grid, and not a first task that several cells share.
        taken: Whether its first task was taken over.
    """

    name: str
    folder: Path
    state: State = "waiting"
    counts: bool = True
    task: int = 0
    tasks: int | None = None
    accuracy: float | None = None
    seconds: float = 0.0
    taken: bool = False
    fault: str = ""
    began: float | None = None
    ended: float | None = None
    _log: int = -1
    _seen: str = ""
    _since: float = 0.0

    @property
    def elapsed(self) -> float | None:
        """Return the seconds since it was begun, until now or until it ended."""
        return None if self.began is None else (self.ended or monotonic()) - self.began

    @property
    def left(self) -> float | None:
        """Return the seconds that it may still take, by the tasks that it has learned."""
        if self.tasks is None or not self.task:
            return None
        return max(0.0, (self.tasks - self.task) * self.seconds / self.task - (monotonic() - self._since))

    def submitted(self) -> None:
        """Note how long the log is; what is written from now on is written by the job."""
        self._log = _size(self.folder / LOG)

    def look(self) -> None:
        """See whether the job has begun, and what it has learned since the last look."""
        if self.state == "waiting" and self._log >= 0 and _size(self.folder / LOG) > self._log:
            self.state, self.began = "running", monotonic()
        try:
            generation = model_folder.current(self.folder)
            if generation is None or generation.name == self._seen:
                return
            self._read(model_folder.read(self.folder, generation))
            self._seen, self._since = generation.name, monotonic()
        except (OSError, CofimaError):  # it is being replaced at this moment: the next look will do
            return

    def _read(self, generation: Generation) -> None:
        rows = generation.history()
        self.task, self.tasks = len(rows), generation.record.planned_tasks
        self.seconds = sum(row.seconds["total"] for row in rows)
        self.taken = any(NOTE in row.notes for row in rows)
        self.accuracy = rows[-1].overall


@dataclass
class Board:
    """All rows of a grid, and how long it may still take."""

    rows: dict[Path, Row] = field(default_factory=dict)
    slots: int | None = None
    began: float = field(default_factory=monotonic)

    def look(self) -> None:
        """Look at every folder that may have changed."""
        for row in self.rows.values():
            if row.state in ("waiting", "running"):
                row.look()

    def end(self, folder: Path, fault: str | None) -> None:
        """Note that a job is over."""
        row = self.rows[folder]
        row.look()
        row.ended, row.state, row.fault = monotonic(), "failed" if fault else "done", fault or ""

    def count(self, state: State) -> int:
        """Return how many cells are in a state."""
        return sum(row.state == state for row in self.rows.values() if row.counts)

    @property
    def left(self) -> float | None:
        """Return the seconds that everything may still take; who has not begun takes what others took."""
        known = [w for w in map(_whole, self.rows.values()) if w]
        if not known:
            return None
        typical = sum(known) / len(known)
        going = [row for row in self.rows.values() if row.state in ("waiting", "running")]
        rest = [typical if row.left is None or row.state == "waiting" else row.left for row in going]
        width = min(len(rest), self.slots or sum(row.state == "running" for row in going) or 1)
        return max(max(rest, default=0.0), sum(rest) / width) if rest else 0.0


def board(folders: Iterable[Path], slots: int | None) -> Board:
    """Return a board for cells that are not done."""
    rows = {folder: Row(folder.name, folder) for folder in folders}
    for row in rows.values():
        row.look()
    return Board(rows, slots)


def _whole(row: Row) -> float | None:
    """Return what a row's folder takes, as far as it can be known."""
    if not row.counts or not row.tasks or not row.task:
        return None
    return row.seconds * row.tasks / row.task


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
