"""Scheduling of grid cells; the same call resumes a grid, and retries failed cells."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.experiment.grid import shared_first_task
from cofima.experiment.grid.cells import name
from cofima.experiment.grid.executors.base import Executor, Job
from cofima.experiment.grid.executors.local import LocalExecutor
from cofima.experiment.grid.resources import Resources
from cofima.experiment.grid.status import CellStatus, GridStatus, StatusLines
from cofima.store import model_folder
from cofima.store.config import Config

PULSE = 0.5  # seconds between status updates

Watch = Callable[[GridStatus], None]
"""Callback that receives the status at every update."""


@dataclass
class GridOutcome:
    """Folders of finished cells, and error messages of failed ones."""

    done: list[Path] = field(default_factory=list)
    failed: dict[Path, str] = field(default_factory=dict)


def run_grid(
    cells: Sequence[Config],
    out: Path,
    jobs: int = 1,
    progress: Progress = SILENT,
    *,
    executor: Executor | None = None,
    watch: Watch | None = None,
    needs: Mapping[str, Resources] | None = None,
) -> GridOutcome:
    """Learn every cell into its own folder below ``out``; finished cells are skipped.

    Args:
        cells: One configuration per cell.
        out: The folder of the grid.
        jobs: Number of concurrent cells on this machine, without an ``executor``.
        progress: Receives a message per change, without a ``watch``.
        executor: Runs the cells; by default processes on this machine.
        watch: Called with the status at every update.
        needs: Resources of cells, by name.
    """
    folders = {out / name(config): config for config in cells}
    outcome = GridOutcome()
    for folder in folders:
        try:
            outcome.done += [folder] if model_folder.finished(folder) else []
        except CofimaError as error:  # a damaged folder fails its own cell only
            outcome.failed[folder] = str(error)
    over = {*outcome.done, *outcome.failed}
    todo = {folder: config for folder, config in folders.items() if folder not in over}
    if outcome.done:
        progress.say(f"{len(outcome.done)} of {len(folders)} cells are done already")
    if not todo:
        return outcome
    executor = LocalExecutor(jobs) if executor is None else executor
    # absolute paths: jobs may run in other processes or on other nodes
    made = {
        folder: Job(config, folder.absolute(), (needs or {}).get(folder.name, Resources()))
        for folder, config in todo.items()
    }
    status = GridStatus.of(todo, executor.slots)
    try:
        _Schedule(made, out, executor, status).run(outcome, watch or StatusLines(progress))
    finally:
        executor.stop()
    return outcome


class _Schedule:
    """Dependencies between jobs: cells that share a first task wait until it is learned.

    Methods that differ only after the first task need not each learn it.
    """

    def __init__(self, jobs: dict[Path, Job], out: Path, executor: Executor, status: GridStatus) -> None:
        self.jobs, self.executor, self.status = jobs, executor, status
        self.groups = shared_first_task.shared({folder: job.config for folder, job in jobs.items()}, out)
        self.running: dict[Job, Path] = {}

    def run(self, outcome: GridOutcome, watch: Watch) -> None:
        """Wait for jobs, record those that end, and submit the cells that waited for them."""
        self._begin()
        while self.running:
            for job, fault in self.executor.ended(PULSE):
                self._end(job, fault, outcome)
            self.status.update()
            watch(self.status)
        shared_first_task.clear(self.groups)

    def _begin(self) -> None:
        """Submit shared first tasks first, as other cells wait for them; then the cells that need none."""
        waiting: set[Path] = set()
        for first, group in self.groups.items():
            if shared_first_task.learned(first):
                continue
            waiting |= set(group)
            lead = self.jobs[group[0]]
            title = f"first task of {len(group)} cells like {group[0].name}"
            self.status.rows[first] = CellStatus(title, first, counts=False)
            self._submit(Job(lead.config, first.absolute(), lead.resources, tasks=1), first)
        for folder in self.jobs:
            if folder not in waiting:
                self._submit_cell(folder)

    def _end(self, job: Job, fault: str | None, outcome: GridOutcome) -> None:
        """Record the end of a cell, or submit the cells that waited for a first task."""
        folder = self.running.pop(job)
        self.status.end(folder, fault)
        if folder in self.groups:  # even if it failed: then each cell learns it itself and reports the reason
            for cell in self.groups[folder]:
                self._submit_cell(cell)
        elif fault is None:
            outcome.done.append(folder)
        else:
            outcome.failed[folder] = fault

    def _submit_cell(self, folder: Path) -> None:
        first = next((first for first, group in self.groups.items() if folder in group), None)
        job = self.jobs[folder]
        if first is not None:
            job = Job(job.config, job.folder, job.resources, first=first.absolute())
        self._submit(job, folder)

    def _submit(self, job: Job, folder: Path) -> None:
        self.status.rows[folder].submitted()
        self.running[job] = folder
        self.executor.submit(job)
