"""Runs, read from run folders or from a study.

A study is a JSON Lines file with one run per line, ``{"name": ..., "record": ..., "history": [...]}``: the
contents of config.json and history.jsonl of its folder, without the weights.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cofima.core.atomic import write_text
from cofima.core.errors import CofimaError, problems
from cofima.store import model_folder
from cofima.store.config import Config
from cofima.store.generation import CURRENT
from cofima.store.history import HistoryRow, describe_errors
from cofima.store.record import Record

STUDY = ".jsonl"


@dataclass(frozen=True)
class Run:
    """One run, finished or not.

    Attributes:
        folder: Its folder; for a run in a study, the path of the study followed by its name.
        source: The path it was read from: its folder, or the study.
        record: The contents of config.json.
        history: One row per learned task.
    """

    folder: Path
    source: Path
    record: Record
    history: list[HistoryRow]

    @property
    def label(self) -> str:
        """Display name of the method."""
        return self.record.method.label

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return self.record.config

    @property
    def method(self) -> str:
        """Name of the method in the registry."""
        return str(self.config["method"])

    @property
    def seed(self) -> int:
        """Random seed of the run."""
        return int(self.config["seed"])

    @property
    def dataset(self) -> str:
        """Name of the dataset."""
        return str(self.record.data.get("name") or self.config["dataset"])

    @property
    def backbone(self) -> str:
        """Name of the backbone, with its tag."""
        return str(self.record.backbone.get("name") or self.config["backbone"])

    @property
    def origin(self) -> str:
        """Description of the backbone's pre-training, and its known overlap with the dataset."""
        kept = self.record.backbone
        if not kept.get("pretraining"):
            return ""
        alias = f"{kept['alias']}, " if kept.get("alias") else ""
        norm = "final norm reset, " if kept.get("final_norm") == "reset" else ""
        shared = f"shared with {self.dataset}: {kept.get('overlap') or 'not known'}"
        return f"Backbone: {alias}{norm}pre-trained on: {kept['pretraining']}; {shared}."

    @property
    def code(self) -> str:
        """Hashes of the run's plugins: different code is a different method."""
        return ", ".join(plugin.get("sha256", "")[:12] for plugin in self.record.plugins)

    @property
    def all_at_once(self) -> bool:
        """True if all classes were learned at once, so that there is no accuracy over time."""
        return self.record.method.all_at_once

    @property
    def planned(self) -> int:
        """Number of tasks to learn; 1 if all classes are learned at once."""
        return 1 if self.all_at_once else self.record.planned_tasks

    @property
    def finished(self) -> bool:
        """True if every planned task has been learned."""
        return len(self.history) >= self.planned

    @property
    def state(self) -> str:
        """Progress of the run, such as ``3 of 5 tasks``."""
        return f"{len(self.history)} of {self.planned} task{'s' if self.planned != 1 else ''}"

    @property
    def tasks(self) -> list[list[str]]:
        """Classes of each task, as far as they are known."""
        learned = [row.classes for row in self.history]
        return learned if self.all_at_once else learned + self.record.tasks[len(learned) :]

    @property
    def matrix(self) -> list[list[float]]:
        """Accuracy matrix (%): after each task, on each task seen."""
        return [row.measured for row in self.history]

    @property
    def sizes(self) -> list[int]:
        """Number of test images of each task seen."""
        return self.history[-1].sizes if self.history else []

    @property
    def distances(self) -> list[float | None]:
        """Distance of the backbone from its pre-trained weights, after each task."""
        return [row.distance.from_start for row in self.history]

    @property
    def seconds(self) -> list[float]:
        """Time of each task in seconds."""
        return [row.seconds.get("total", sum(row.seconds.values())) for row in self.history]


class StudyLine(BaseModel):
    """One run of a study."""

    model_config = ConfigDict(extra="forbid")

    name: str
    record: Record
    history: list[HistoryRow]


def read(folder: str | Path) -> Run:
    """Read the current generation of a run folder; raise if a file was modified."""
    folder = Path(folder)
    record, rows = model_folder.read_with(folder, lambda found: (found.record, found.history()))
    return _run(folder, folder, record, rows)


def read_study(file: Path) -> list[Run]:
    """Read the runs of a study; one error lists all problems in its lines."""
    runs, wrong = [], []
    for number, text in enumerate(file.read_text("utf-8").splitlines(), start=1):
        try:
            line = StudyLine.model_validate_json(text)
            runs.append(_run(file / line.name, file, line.record, line.history))
        except ValidationError as error:
            wrong += describe_errors(f"line {number}", error)
        except CofimaError as error:
            wrong.append(f"line {number}: {error}")
    if wrong:
        raise problems(str(file), wrong)
    return runs


def collect(folders: Iterable[Path], file: Path) -> None:
    """Add runs to a study, named by their folders; runs that are already in it are not replaced."""
    kept = file.read_text("utf-8").splitlines() if file.is_file() else []
    names = {json.loads(line)["name"] for line in kept}
    for folder in folders:
        if folder.name not in names:
            run = read(folder)
            # checksums are useless without their files, which a study does not contain; and a path says more
            # about the machine than about the images
            data = run.record.data
            data = data | {"folder": Path(data["folder"]).name} if "folder" in data else data
            record = run.record.model_copy(update={"files": {}, "parent": None, "data": data})
            line = StudyLine(name=folder.name, record=record, history=run.history)
            kept.append(json.dumps(line.model_dump(mode="json")))
    write_text(file, "".join(f"{line}\n" for line in kept))


def find(paths: Iterable[str | Path]) -> list[Run]:
    """Read all runs at or below ``paths``, or in studies, without duplicates; raise with all problems."""
    found: dict[Path, Run] = {}
    faults = []
    for path in map(Path, paths):
        try:
            runs = list(_at(path))
        except CofimaError as error:
            faults.append(str(error))
            continue
        if not runs:
            fault = "no run at or below it" if path.exists() else "no such folder or study"
            faults.append(f"{path}: {fault}")
        for run in runs:
            found.setdefault(run.folder.resolve(), run)
    if faults:
        raise CofimaError("\n".join(faults))
    return list(found.values())


def _at(path: Path) -> Iterator[Run]:
    """Yield the runs at or below a path; one error lists all problems."""
    if path.suffix == STUDY and path.is_file():
        yield from read_study(path)
        return
    faults = []
    for folder in sorted(Path(at) for at, folders, files in os.walk(path) if _stop_at_run(folders, files)):
        try:
            yield read(folder)
        except CofimaError as error:
            faults.append(str(error))
    if faults:
        raise CofimaError("\n".join(faults))


def _run(folder: Path, source: Path, record: Record, rows: Sequence[HistoryRow]) -> Run:
    """Validate what reports rely on, and fill in the defaults of settings newer than the run."""
    tasks = [row for row in rows if row.kind == "task"]
    faults = [fault for number in range(len(tasks)) for fault in _oddities(tasks[: number + 1])]
    if rows and not tasks:
        faults.append("no task of a run; cofima history shows what happened to this model")
    try:
        config = Config.model_validate(record.config).model_dump(mode="json")
    except ValidationError as error:
        raise problems(f"run {folder}", [*describe_errors("config", error), *faults]) from error
    if faults:
        raise problems(f"run {folder}", faults)
    return Run(folder, source, record.model_copy(update={"config": config}), tasks)


def _oddities(tasks: Sequence[HistoryRow]) -> list[str]:
    """Return the contradictions of the newest row with its position or the previous row."""
    row, number, found = tasks[-1], len(tasks), []
    if row.task != number:
        found.append(f"expected task {number}, got task {row.task}")
    if len(row.measured) != number:
        found.append(f"expected {number} accuracies, one for each task so far, got {len(row.measured)}")
    if len(row.sizes) != number or not all(row.sizes):
        found.append(f"expected {number} test-set sizes, one for each task so far, got {row.sizes}")
    if number > 1 and row.sizes[: number - 1] != tasks[-2].sizes:
        found.append(f"the test sets of earlier tasks changed size, from {tasks[-2].sizes} to {row.sizes}")
    return [f"history row {number}: {fault}" for fault in found]


def _stop_at_run(folders: list[str], files: list[str]) -> bool:
    """Return True at a run folder, and keep the walk from entering its generations and hidden folders."""
    is_run = CURRENT in files
    if is_run:
        folders.clear()
    folders[:] = [name for name in folders if not name.startswith(".")]  # shared first tasks, executor files
    return is_run
