"""Many runs, side by side; the same call continues, and does again only what failed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.experiment.grid import shared_first_task
from cofima.experiment.grid.cells import name
from cofima.experiment.grid.executors.base import Engine, Job
from cofima.experiment.grid.executors.local import Local
from cofima.experiment.grid.resources import Resources
from cofima.experiment.grid.status import Board, Row, board
from cofima.store import model_folder
from cofima.store.config import Config

PULSE = 0.5  # seconds between two looks

Watch = Callable[[Board], None]
"""What is shown the board again and again."""


@dataclass
class Outcome:
    """What became of the cells of a grid: their folders, and what went wrong in those that failed."""

    done: list[Path] = field(default_factory=list)
    failed: dict[Path, str] = field(default_factory=dict)


def run_grid(
    cells: Sequence[Config],
    out: Path,
    jobs: int = 1,
    progress: Progress = SILENT,
    *,
    engine: Engine | None = None,
    watch: Watch | None = None,
    needs: Mapping[str, Resources] | None = None,
) -> Outcome:
    """Learn every cell into its own folder below ``out``.

    They run ``jobs`` at a time on this machine, or where ``engine`` says. ``watch`` is shown how far
    everything is, again and again; without it changes are said to ``progress``. ``needs`` says what cells
    may use of a machine, by their names.
    """
    folders = {out / name(config): config for config in cells}
    outcome = Outcome()
    for folder in folders:
        try:
            outcome.done += [folder] if model_folder.finished(folder) else []
        except CofimaError as error:  # a damaged folder is left alone, and keeps no other cell from its work
            outcome.failed[folder] = str(error)
    over = {*outcome.done, *outcome.failed}
    todo = {folder: config for folder, config in folders.items() if folder not in over}
    if outcome.done:
        progress.say(f"{len(outcome.done)} of {len(folders)} cells are done already")
    if not todo:
        return outcome
    engine = Local(jobs) if engine is None else engine
    made = {
        folder: Job(config, folder.absolute(), (needs or {}).get(folder.name, Resources()))
        for folder, config in todo.items()
    }
    seen = board(todo, engine.slots)
    try:
        _run(_Schedule(made, out, engine, seen), outcome, watch or Lines(progress))
    finally:
        engine.stop()
    return outcome


def _run(schedule: "_Schedule", outcome: Outcome, watch: Watch) -> None:
    """Wait for jobs, note how they ended, and let those begin that waited for them."""
    schedule.begin()
    while schedule.running:
        for job, fault in schedule.engine.ended(PULSE):
            folder = schedule.end(job, fault)
            if folder is not None and fault is None:
                outcome.done.append(folder)
            elif folder is not None:
                outcome.failed[folder] = fault or ""
        schedule.board.look()
        watch(schedule.board)
    shared_first_task.clear(schedule.groups)


class _Schedule:
    """Which job waits for which: cells that share a first task wait until that is learned."""

    def __init__(self, jobs: dict[Path, Job], out: Path, engine: Engine, seen: Board) -> None:
        self.jobs, self.engine, self.board = jobs, engine, seen
        self.groups = shared_first_task.shared({folder: job.config for folder, job in jobs.items()}, out)
        self.running: dict[Job, Path] = {}

    def begin(self) -> None:
        """Submit first tasks, then the cells that wait for none."""
        waiting: set[Path] = set()
        for first, group in self.groups.items():
            if shared_first_task.learned(first):
                continue
            waiting |= set(group)
            lead = self.jobs[group[0]]
            title = f"first task of {len(group)} cells like {group[0].name}"
            self.board.rows[first] = Row(title, first, counts=False)
            self._submit(Job(lead.config, first.absolute(), lead.resources, tasks=1), first)
        for folder in self.jobs:
            if folder not in waiting:
                self._submit_cell(folder)

    def end(self, job: Job, fault: str | None) -> Path | None:
        """Note the end of a job; return the folder of a cell, or begin the cells that waited."""
        folder = self.running.pop(job)
        self.board.end(folder, fault)
        if folder not in self.groups:
            return folder
        for cell in self.groups[folder]:  # if it failed they try for themselves, and say why
            self._submit_cell(cell)
        return None

    def _submit_cell(self, folder: Path) -> None:
        first = next((first for first, group in self.groups.items() if folder in group), None)
        job = self.jobs[folder]
        if first is not None:
            job = Job(job.config, job.folder, job.resources, first=first.absolute())
        self._submit(job, folder)

    def _submit(self, job: Job, folder: Path) -> None:
        self.board.rows[folder].submitted()
        self.running[job] = folder
        self.engine.submit(job)


class Lines:
    """Say what changes on a board, a line each."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.said: dict[Path, tuple[str, int]] = {}

    def __call__(self, seen: Board) -> None:
        """Say what is new."""
        for folder, row in seen.rows.items():
            before, now = self.said.get(folder, ("waiting", row.task)), (row.state, row.task)
            if before != now:
                self.progress.say(line(row))
            if before[0] != now[0] and row.state in ("done", "failed") and row.counts:
                self.progress.say(summary(seen))
            self.said[folder] = now


def line(row: Row) -> str:
    """Say how far a row is."""
    of = f"task {row.task}/{row.tasks}, {row.accuracy:.1f} %" if row.tasks else ""
    words = {"failed": f"failed: {row.fault}", "done": f"done, {minutes(row.seconds)}"}
    said = [row.state if row.state == "running" and not of else "", of, words.get(row.state, "")]
    shared = "first task shared" if row.taken and row.task == 1 else ""
    return f"{row.name}: {', '.join(part for part in (*said, shared) if part)}"


def summary(seen: Board) -> str:
    """Say how far the grid is, and how long it may take."""
    parts = [f"{seen.count(state)} {state}" for state in ("done", "running", "waiting", "failed")]
    left = "" if seen.left is None else f"; about {minutes(seen.left)} left"
    return f"cells: {', '.join(parts)}{left}"


def minutes(seconds: float) -> str:
    """Write a time as a person says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:,.0f} days"
