"""Status of a grid, read from the folders of its cells and thus independent of the executor."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Literal

from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.experiment.grid.shared_first_task import NOTE
from cofima.experiment.grid.worker import LOG
from cofima.store import model_folder
from cofima.store.generation import Generation

State = Literal["waiting", "running", "done", "failed"]


@dataclass
class CellStatus:
    """Status of one job.

    Attributes:
        name: Name to show.
        folder: Its model folder.
        state: Waiting, running, done or failed.
        counts: False for a first task that several cells share, which is not a cell of the grid.
        task: Number of tasks learned.
        tasks: Number of tasks planned, if known.
        accuracy: Overall accuracy after the last task.
        seconds: Time of all tasks learned.
        taken: True if it started from a shared first task.
        fault: Error message if it failed.
        began: Time of its start.
        ended: Time of its end.
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
        """Seconds since its start, until now or until its end."""
        return None if self.began is None else (self.ended or monotonic()) - self.began

    @property
    def left(self) -> float | None:
        """Estimated seconds left, from the tasks learned so far."""
        if self.tasks is None or not self.task:
            return None
        return max(0.0, (self.tasks - self.task) * self.seconds / self.task - (monotonic() - self._since))

    def submitted(self) -> None:
        """Record the size of the log: the job has started when it grows."""
        self._log = _size(self.folder / LOG)

    def update(self) -> None:
        """Read from the folder if the job has started, and the tasks learned since the last update."""
        if self.state == "waiting" and self._log >= 0 and _size(self.folder / LOG) > self._log:
            self.state, self.began = "running", monotonic()
        try:
            generation = model_folder.current(self.folder)
            if generation is None or generation.name == self._seen:
                return
            self._read(model_folder.read(self.folder, generation))
            self._seen, self._since = generation.name, monotonic()
        except (OSError, CofimaError):  # being replaced at this moment: the next update will read it
            return

    def _read(self, generation: Generation) -> None:
        rows = generation.history()
        self.task, self.tasks = len(rows), generation.record.planned_tasks
        self.seconds = sum(row.seconds["total"] for row in rows)
        self.taken = any(NOTE in row.notes for row in rows)
        self.accuracy = rows[-1].overall


@dataclass
class GridStatus:
    """Status of all cells of a grid."""

    rows: dict[Path, CellStatus] = field(default_factory=dict)
    slots: int | None = None
    began: float = field(default_factory=monotonic)

    @classmethod
    def of(cls, folders: Iterable[Path], slots: int | None) -> "GridStatus":
        """Return the status of cells to run; ``slots`` is the number of concurrent jobs."""
        rows = {folder: CellStatus(folder.name, folder) for folder in folders}
        for row in rows.values():
            row.update()
        return cls(rows, slots)

    def update(self) -> None:
        """Update every job that has not ended."""
        for row in self.rows.values():
            if row.state in ("waiting", "running"):
                row.update()

    def end(self, folder: Path, fault: str | None) -> None:
        """Record the end of a job."""
        row = self.rows[folder]
        row.update()
        row.ended, row.state, row.fault = monotonic(), "failed" if fault else "done", fault or ""

    def count(self, state: State) -> int:
        """Return the number of cells in a state."""
        return sum(row.state == state for row in self.rows.values() if row.counts)

    @property
    def left(self) -> float | None:
        """Estimated seconds left; a cell that has not started is assumed to take the mean of the others."""
        known = [w for w in map(_whole, self.rows.values()) if w]
        if not known:
            return None
        typical = sum(known) / len(known)
        going = [row for row in self.rows.values() if row.state in ("waiting", "running")]
        rest = [typical if row.left is None or row.state == "waiting" else row.left for row in going]
        width = min(len(rest), self.slots or sum(row.state == "running" for row in going) or 1)
        return max(max(rest, default=0.0), sum(rest) / width) if rest else 0.0


def _whole(row: CellStatus) -> float | None:
    """Estimate the total seconds of a cell; None if it has not learned a task yet."""
    if not row.counts or not row.tasks or not row.task:
        return None
    return row.seconds * row.tasks / row.task


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class StatusLines:
    """Callback that prints one line per change of the status."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.shown: dict[Path, tuple[str, int]] = {}

    def __call__(self, status: GridStatus) -> None:
        """Print what has changed since the last call."""
        for folder, row in status.rows.items():
            before, now = self.shown.get(folder, ("waiting", row.task)), (row.state, row.task)
            if before != now:
                self.progress.say(line(row))
            if before[0] != now[0] and row.state in ("done", "failed") and row.counts:
                self.progress.say(summary(status))
            self.shown[folder] = now


def line(row: CellStatus) -> str:
    """Return the status of a cell in one line."""
    of = f"task {row.task}/{row.tasks}, {row.accuracy:.1f} %" if row.tasks else ""
    words = {"failed": f"failed: {row.fault}", "done": f"done, {minutes(row.seconds)}"}
    parts = [row.state if row.state == "running" and not of else "", of, words.get(row.state, "")]
    shared = "first task shared" if row.taken and row.task == 1 else ""
    return f"{row.name}: {', '.join(part for part in (*parts, shared) if part)}"


def summary(status: GridStatus) -> str:
    """Return the status of the grid in one line."""
    parts = [f"{status.count(state)} {state}" for state in ("done", "running", "waiting", "failed")]
    left = "" if status.left is None else f"; about {minutes(status.left)} left"
    return f"cells: {', '.join(parts)}{left}"


def minutes(seconds: float) -> str:
    """Format a duration in a readable unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:,.0f} days"
