"""Run folders as records: what was configured, and what was measured after each task."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cofima.errors import CofimaError, problems
from cofima.history import HistoryRow
from cofima.report.records import Setup, read_history, read_setup, read_text


@dataclass(frozen=True)
class Run:
    """One run, finished or not, as its folder describes it."""

    folder: Path
    setup: Setup
    history: list[HistoryRow]

    @property
    def label(self) -> str:
        """Return the method's name for people."""
        return self.setup.method.label

    @property
    def config(self) -> dict[str, Any]:
        """Return the resolved config."""
        return self.setup.config

    @property
    def method(self) -> str:
        """Return the method's name for programs."""
        return str(self.config.get("method", ""))

    @property
    def seed(self) -> Any:
        """Return the seed of the run."""
        return self.config.get("seed")

    @property
    def dataset(self) -> str:
        """Return the name of the dataset."""
        return str(self.setup.data.get("name") or self.config.get("dataset", "unknown data"))

    @property
    def backbone(self) -> str:
        """Return the name of the backbone, with its tag."""
        return str(self.setup.backbone.get("name") or self.config.get("backbone", "unknown backbone"))

    @property
    def origin(self) -> str:
        """Say what the backbone has seen before, and what of it is known to be in the dataset."""
        kept = self.setup.backbone
        if not kept.get("pretraining"):  # written before this was recorded
            return ""
        alias = f"{kept['alias']}, " if kept.get("alias") else ""
        norm = "final norm reset, " if kept.get("final_norm") == "reset" else ""
        shared = f"shared with {self.dataset}: {kept.get('overlap') or 'not known'}"
        return f"Backbone: {alias}{norm}pre-trained on: {kept['pretraining']}; {shared}."

    @property
    def code(self) -> str:
        """Return the hashes of the plugins that the run was made with: other code is another method."""
        return ", ".join(plugin.get("sha256", "")[:12] for plugin in self.setup.plugins)

    @property
    def joint(self) -> bool:
        """Tell whether all classes were learnt at once: such a run has no accuracy over time."""
        return self.setup.method.all_at_once

    @property
    def planned(self) -> int:
        """Return the number of tasks of the stream, 1 for joint training."""
        return 1 if self.joint else self.setup.planned_tasks

    @property
    def finished(self) -> bool:
        """Tell whether every planned task has been learnt."""
        return len(self.history) >= self.planned

    @property
    def state(self) -> str:
        """Say how far the run has come, for example ``3 of 5 tasks``."""
        return f"{len(self.history)} of {self.planned} task{'s' if self.planned != 1 else ''}"

    @property
    def tasks(self) -> list[list[str]]:
        """Return the classes of each task, as far as they are known."""
        learnt = [step.classes for step in self.history]
        return learnt if self.joint else learnt + self.setup.tasks[len(learnt) :]

    @property
    def matrix(self) -> list[list[float]]:
        """Return the accuracies (%) after each task on each task seen."""
        return [row.measured for row in self.history]

    @property
    def sizes(self) -> list[int]:
        """Return the number of test images of each task seen."""
        return self.history[-1].sizes if self.history else []

    @property
    def lam(self) -> list[float | None]:
        """Return the share of the new weights at each task."""
        return [step.lam for step in self.history]

    @property
    def distances(self) -> list[float | None]:
        """Return the distance of the backbone from its pre-trained weights after each task."""
        return [step.distance.from_start for step in self.history]

    @property
    def seconds(self) -> list[float]:
        """Return the time that each task took."""
        return [step.seconds.get("total", sum(step.seconds.values())) for step in self.history]


def read(folder: str | Path) -> Run:
    """Read the generation in force of a run folder; every fault found is named in one error."""
    folder = Path(folder)
    pointer = folder / "CURRENT"
    if not pointer.is_file():
        raise CofimaError(
            f"no run in {folder}: it has no file CURRENT (it appears with the first finished task)"
        )
    name = read_text(pointer).strip()
    generation = folder / name
    if not name or Path(name).name != name or not generation.is_dir():
        raise problems(f"run {folder}", [f"CURRENT names the generation '{name[:40]}', which is not there"])
    faults: list[str] = []
    setup = read_setup(generation / "config.json", faults)
    history = read_history(generation / "history.jsonl", faults)
    if setup is None or faults:
        raise problems(f"run {folder}", faults)
    return Run(folder, setup, history)


def find(paths: Iterable[str | Path]) -> list[Run]:
    """Read every run at or below ``paths``, each once; list all faults of all runs in one error."""
    found: dict[Path, Path] = {}
    faults = []
    for path in map(Path, paths):
        below = [Path(at) for at, folders, files in os.walk(path) if _stop_at_run(folders, files)]
        if not below:
            faults.append(f"{path}: {'no run at or below it' if path.is_dir() else 'no such folder'}")
        for folder in sorted(below):
            found.setdefault(folder.resolve(), folder)
    runs = []
    for folder in found.values():
        try:
            runs.append(read(folder))
        except CofimaError as error:
            faults.append(str(error))
    if faults:
        raise CofimaError("\n".join(faults))
    return runs


def _stop_at_run(folders: list[str], files: list[str]) -> bool:
    """Tell whether a walk has come to a run, and keep it from entering its generations."""
    is_run = "CURRENT" in files
    if is_run:
        folders.clear()
    folders[:] = [name for name in folders if not name.startswith(".")]  # what a grid keeps for itself
    return is_run
