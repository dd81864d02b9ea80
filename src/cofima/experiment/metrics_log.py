"""metrics.jsonl: the log of a run, written as it goes; trackers show what is in it.

One line an epoch (``kind`` epoch: loss, learning rates, seconds) and one a task (its row of the history).
Lines are appended. A run that was cut off drops the lines of what it repeats before it writes them again,
so that no epoch of a task is there twice.
"""

import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from cofima.core import distributed
from cofima.core.atomic import write_text
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.store.history import HistoryRow

METRICS = "metrics.jsonl"
Line = dict[str, Any]
Listener = Callable[[Line], None]


def read(folder: Path) -> list[Line]:
    """Return the lines of a run; one that a kill cut short is left out."""
    file = folder / METRICS
    if not file.is_file():
        return []
    lines = []
    for number, text in enumerate(file.read_text("utf-8").splitlines(keepends=True), start=1):
        if not text.endswith("\n"):
            break
        try:
            line = json.loads(text)
            line["kind"], line["task"], line["step"]
        except (ValueError, KeyError, TypeError):
            raise CofimaError(
                f"{file} line {number} is not a line of a run: {text[:60]!r}. Take it out, or remove the "
                "file: the model does not need it"
            ) from None
        lines.append(line)
    return lines


def complete(folder: Path, history: Sequence[HistoryRow]) -> list[Line]:
    """Return the lines of a run, and those of tasks that only its history has; nothing is written."""
    lines = read(folder)
    told = {line["task"] for line in lines if line["kind"] == "task"}
    last: Line = lines[-1] if lines else {"step": 0, "time": 0.0}
    return lines + [_task_line(row, last["step"], last["time"]) for row in history if row.task not in told]


def _task_line(row: HistoryRow, step: int, when: float) -> Line:
    return {**row.model_dump(mode="json"), "step": step, "time": when, "seen": row.overall}


class Journal:
    """The lines of one run, on disk and to those who listen.

    A listener is told all lines of tasks that are finished at once, and others as they are written.
    """

    def __init__(
        self, folder: Path, history: Sequence[HistoryRow], listeners: Sequence[Listener] = ()
    ) -> None:
        self.file, self.listeners = folder / METRICS, list(listeners)
        before = read(folder)
        self.lines = [line for line in before if line["task"] <= len(history)]
        # epochs of the task that was cut off: valid as far as it does not repeat them
        self.open = [e for e in before if e["task"] == len(history) + 1 and e["kind"] == "epoch"]
        self.changed = not self._as_on_disk()
        self.since, self.passed = time.perf_counter(), (-1, 0)
        told = {line["task"] for line in self.lines if line["kind"] == "task"}
        for line in self.lines:
            self._tell(line)
        for row in history:  # written before there was a journal, or killed before its last line
            if row.task not in told:
                self.task(row)

    def begin(self) -> None:
        """Start the clock of a task."""
        self.since, self.passed = time.perf_counter(), (-1, 0)

    def epoch(self, task: int, epoch: int, losses: Tensor, rates: Sequence[float]) -> None:
        """Write down an epoch: its place, counted from 0, the loss of each step, the optimizer's rates."""
        last, offset = self.passed
        offset = offset if epoch > last else offset + last + 1  # a method may train twice in a task
        self.passed = (epoch, offset)
        now = time.perf_counter()
        self._settle(task + 1, epoch + offset + 1)
        line: Line = {
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
        self.since = time.perf_counter()  # what listeners take is not the next epoch's

    def task(self, row: HistoryRow) -> None:
        """Write down a task that is finished and on disk, as the history has it."""
        self._settle(row.task, None)
        self._append(_task_line(row, self._step(), round(time.time(), 3)))

    def _settle(self, task: int, epoch: int | None) -> None:
        """Take over the epochs of a task that was cut off, up to the one that comes now."""
        for line in self.open:
            if line["task"] == task and (epoch is None or line["epoch"] < epoch):
                self.lines.append(line)
                self._tell(line)
            else:
                self.changed = True
        self.open = []

    def _append(self, line: Line) -> None:
        self.lines.append(line)
        if distributed.rank() == 0:  # of several processes that learn together, one writes
            try:
                self._write(line)
            except OSError as error:
                raise CofimaError(f"{self.file} could not be written ({error.strerror})") from error
        self._tell(line)

    def _write(self, line: Line) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.changed:
            write_text(self.file, "".join(json.dumps(each) + "\n" for each in self.lines))
            self.changed = False
            return
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _tell(self, line: Line) -> None:
        """Pass a line on; a listener that fails is left out, since learning must not end with it."""
        for listener in list(self.listeners):
            try:
                listener(line)
            except Exception as error:
                self.listeners.remove(listener)
                text = f"a tracker failed and is left out; {self.file} has all it missed: {error}"
                warnings.warn(text, CofimaWarning, stacklevel=2)

    def _step(self) -> int:
        return int(self.lines[-1]["step"]) if self.lines else 0

    def _as_on_disk(self) -> bool:
        text = self.file.read_text("utf-8") if self.file.is_file() else ""
        return text == "".join(json.dumps(line) + "\n" for line in [*self.lines, *self.open])
