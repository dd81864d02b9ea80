"""Many runs, side by side in processes; the same call continues, and does again only what failed."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from time import monotonic

from cofima import store
from cofima.config import Config
from cofima.errors import CofimaError
from cofima.experiment.cells import name
from cofima.progress import SILENT, Progress


@dataclass
class Outcome:
    """What became of the cells of a grid: their folders, and what went wrong in those that failed."""

    done: list[Path] = field(default_factory=list)
    failed: dict[Path, str] = field(default_factory=dict)


def run_grid(cells: Sequence[Config], out: Path, jobs: int = 1, progress: Progress = SILENT) -> Outcome:
    """Learn every cell into its own folder below ``out``, ``jobs`` at a time, each in a fresh process."""
    folders = {out / name(config): config for config in cells}
    outcome = Outcome([folder for folder in folders if store.finished(folder)])
    todo = {folder: config for folder, config in folders.items() if folder not in outcome.done}
    if outcome.done:
        progress.say(f"{len(outcome.done)} of {len(folders)} cells are done already")
    if not todo:
        return outcome
    threads = max(1, (os.cpu_count() or 1) // jobs)
    start = monotonic()
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        started = {pool.submit(_learn, config, folder, threads): folder for folder, config in todo.items()}
        try:
            for future in progress.track(as_completed(started), len(started), "cells"):
                _note(future, started[future], outcome, progress)
                ready = len(outcome.done) + len(outcome.failed)
                share = (len(folders) - ready) / (len(started) - len(folders) + ready)
                left = share * (monotonic() - start) / 60
                progress.say(f"{ready} of {len(folders)} cells, about {left:.0f} min left")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return outcome


def _note(future: Future[str], folder: Path, outcome: Outcome, progress: Progress) -> None:
    """Write down how a cell ended."""
    try:
        progress.say(f"{folder.name}: {future.result()}")
        outcome.done.append(folder)
    except BrokenProcessPool as error:
        raise CofimaError(
            f"a process of the grid was killed ({error}); finished cells and tasks are kept, "
            "the same command continues. If memory ran out, give a smaller --jobs."
        ) from error
    except Exception as error:
        outcome.failed[folder] = f"{type(error).__name__}: {error}"
        progress.say(f"{folder.name}: failed, {error}")


def _learn(config: Config, folder: Path, threads: int) -> str:
    """Learn one cell; called in a process of its own."""
    import torch

    from cofima.experiment.launch import launch

    torch.set_num_threads(threads)
    model = launch(config, folder)
    row = model.history[-1]
    right = sum(a * n for a, n in zip(row["accuracy"], row["sizes"], strict=True)) / sum(row["sizes"])
    seconds = sum(step["seconds"]["total"] for step in model.history)
    return f"{right:.1f} % after the last task, {seconds / 60:.1f} min"
