"""metrics.jsonl: the log of a run, appended during training and forwarded to trackers.

It has one line per epoch (``kind`` epoch: loss, learning rates, seconds) and one per task (its history row).
A resumed run drops the lines of epochs that it repeats, so that no epoch of a task appears twice.
"""

import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from cofima.core import distributed
from cofima.core.atomic import open_append, open_file, write_text
from cofima.core.errors import CofimaError, CofimaWarning, file_error
from cofima.core.lock import folder_lock
from cofima.store.history import HistoryRow

METRICS = "metrics.jsonl"
LogLine = dict[str, Any]
Listener = Callable[[LogLine], None]


class _Line(BaseModel):
    """Validated part of a line; the file is untrusted."""

    model_config = ConfigDict(strict=True, extra="allow")

    kind: Literal["epoch", "task"]
    task: Annotated[int, Field(ge=0)]
    step: Annotated[int, Field(ge=0)]
    time: Annotated[float, Field(ge=0, le=1e11)]
    epoch: int = 0
    accuracy: list[float | None] = []
    distance: dict[str, float | None] | None = None
    seconds: float | dict[str, float] = 0.0


def read(folder: Path) -> list[LogLine]:
    """Return the lines of a run, without a last line truncated by a kill."""
    file = folder / METRICS
    lines = []
    for number, text in enumerate(_text(file).splitlines(keepends=True), start=1):
        if not text.endswith("\n"):
            break
        try:
            line = json.loads(text)
            _Line.model_validate(line)
        except (ValueError, RecursionError):
            raise CofimaError(
                f"{file} line {number} is not a line of a run: {text[:60]!r}. Take it out, or remove the "
                "file: the model does not need it"
            ) from None
        lines.append(line)
    return lines


def _text(file: Path) -> str:
    """Return the content of the log, or an empty string if there is no such file."""
    try:
        with open_file(file) as opened:
            return opened.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise file_error(file, error) from error


def complete(folder: Path, history: Sequence[HistoryRow]) -> list[LogLine]:
    """Return the lines of a run, including tasks that are only in its history; nothing is written."""
    lines = read(folder)
    logged = {line["task"] for line in lines if line["kind"] == "task"}
    last: LogLine = lines[-1] if lines else {"step": 0, "time": 0.0}
    return lines + [_task_line(row, last["step"], last["time"]) for row in history if row.task not in logged]


def mend(folder: Path, history: Sequence[HistoryRow]) -> None:
    """Write the lines of tasks that are only in the history: the last task, after a kill at the very end."""
    if (folder / METRICS).is_file() and len(complete(folder, history)) > len(read(folder)):
        with folder_lock(folder):
            lines = complete(folder, history)
            write_text(folder / METRICS, "".join(json.dumps(line) + "\n" for line in lines))


def _task_line(row: HistoryRow, step: int, when: float) -> LogLine:
    return {**row.model_dump(mode="json"), "step": step, "time": when, "seen": row.overall}


class MetricsLog:
    """Writer of metrics.jsonl that also passes each line to listeners.

    Listeners get the lines of finished tasks at once, and later ones as they are written.

    Attributes:
        lines: Valid lines so far.
        pending: Epochs of an interrupted task; those before the first repeated epoch are valid.
        rewrite: The file has invalid lines, so it must be replaced instead of appended to.
    """

    def __init__(
        self, folder: Path, history: Sequence[HistoryRow], listeners: Sequence[Listener] = ()
    ) -> None:
        self.file, self.listeners = folder / METRICS, list(listeners)
        before = read(folder)
        self.lines = [line for line in before if line["task"] <= len(history)]
        self.pending = [e for e in before if e["task"] == len(history) + 1 and e["kind"] == "epoch"]
        self.rewrite = not self._is_on_disk()
        self.begin()
        logged = {line["task"] for line in self.lines if line["kind"] == "task"}
        for line in self.lines:
            self._tell(line)
        for row in history:  # a kill between the model and the log leaves the row in the history only
            if row.task not in logged:
                self.task(row)

    def begin(self) -> None:
        """Start the clock of a task."""
        self.since, self.passed = time.perf_counter(), (-1, 0)

    def epoch(self, task: int, epoch: int, losses: Tensor, rates: Sequence[float]) -> None:
        """Log an epoch: its zero-based number, the loss of each step, and the learning rates."""
        last, offset = self.passed
        offset = offset if epoch > last else offset + last + 1  # a method may train more than once per task
        self.passed = (epoch, offset)
        now = time.perf_counter()
        self._accept_pending(task + 1, epoch + offset + 1)
        line: LogLine = {
            "kind": "epoch",
            "task": task + 1,
            "epoch": epoch + offset + 1,
            "step": self._step() + len(losses),
            "loss": float(losses.mean()),
            "lr": rates[-1],
            **({"backbone_lr": rates[0]} if len(rates) > 1 else {}),
            "seconds": round(now - self.since, 3),
            "time": round(time.time(), 3),
        }
        self._append(line)
        self.since = time.perf_counter()  # excludes the time of listeners

    def task(self, row: HistoryRow) -> None:
        """Log a finished task; its model must already be on disk."""
        self._accept_pending(row.task, None)
        self._append(_task_line(row, self._step(), round(time.time(), 3)))

    def _accept_pending(self, task: int, epoch: int | None) -> None:
        """Accept the pending epochs before the one that is logged now, and drop the others."""
        for line in self.pending:
            if line["task"] == task and (epoch is None or line["epoch"] < epoch):
                self.lines.append(line)
                self._tell(line)
            else:
                self.rewrite = True
        self.pending = []

    def _append(self, line: LogLine) -> None:
        self.lines.append(line)
        if distributed.rank() == 0:  # only one process writes
            try:
                self._write(line)
            except OSError as error:
                raise CofimaError(f"{self.file} could not be written ({error.strerror})") from error
        self._tell(line)

    def _write(self, line: LogLine) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.rewrite:
            write_text(self.file, "".join(json.dumps(each) + "\n" for each in self.lines))
            self.rewrite = False
            return
        with open_append(self.file) as file:
            file.write(json.dumps(line) + "\n")

    def _tell(self, line: LogLine) -> None:
        """Pass a line to the listeners; drop one that fails, as a tracker must not stop the training."""
        for listener in list(self.listeners):
            try:
                listener(line)
            except Exception as error:
                self.listeners.remove(listener)
                text = f"a tracker failed and is left out; {self.file} has all it missed: {error}"
                warnings.warn(text, CofimaWarning, stacklevel=2)

    def _step(self) -> int:
        return int(self.lines[-1]["step"]) if self.lines else 0

    def _is_on_disk(self) -> bool:
        return _text(self.file) == "".join(json.dumps(line) + "\n" for line in [*self.lines, *self.pending])
