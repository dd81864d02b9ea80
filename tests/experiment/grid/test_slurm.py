"""Cells through submitit, with its own executor in the place of Slurm."""

import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cofima.core.errors import CofimaError
from cofima.experiment.grid.executors.base import Job
from cofima.experiment.grid.executors.slurm import SlurmExecutor
from cofima.experiment.grid.resources import Resources
from cofima.experiment.grid.scheduler import run_grid
from cofima.experiment.grid.worker import LOG

submitit = pytest.importorskip("submitit", reason="the extra [slurm] is not installed")


class Handle:
    """A job of submitit in this process, after its end."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self.function(*self.arguments)


@pytest.fixture(params=["here", pytest.param("process", marks=pytest.mark.slow)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run jobs in this process, as if they came out of submitit's file, or in processes that it starts."""

    def submit(self: Any, *job: Any) -> Handle:
        return Handle(*pickle.loads(pickle.dumps(job)))

    if request.param == "here":
        monkeypatch.setattr(submitit.AutoExecutor, "submit", submit)


@pytest.mark.usefixtures("where")
def test_a_grid_runs_through_submitit(
    tmp_path: Path,
    small: Callable[..., Any],
    learned_here: Callable[..., None],
    same_cells: Callable[..., None],
) -> None:
    found = small({"method": "coma", "seed": 1})
    outcome = run_grid(found, tmp_path / "slurm", executor=SlurmExecutor(tmp_path / "slurm", "local", 2))
    assert len(outcome.done) == 1
    assert not outcome.failed
    learned_here(found, tmp_path / "here")
    same_cells(outcome.done, tmp_path / "here")


def test_a_job_that_fails_or_is_lost_says_so(
    tmp_path: Path, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job at a time, each with the threads that its resources say."""
    (config,) = small({"method": "coma", "seed": 1})
    broken = config.model_copy(update={"dataset": f"folder:{tmp_path / 'gone'}"})

    def lost(_: Job) -> None:
        raise RuntimeError("node 7 is gone\n\nand its log with it\nsee there")

    functions, submitted = [None, lost], []

    def submit(self: Any, cell: Any, job: Job) -> Handle:
        submitted.append(job)
        return Handle(functions[len(submitted) - 1] or cell, job)

    monkeypatch.setattr(submitit.AutoExecutor, "submit", submit)
    executor = SlurmExecutor(tmp_path, "local", jobs=1)
    for number in range(2):
        executor.submit(Job(broken, tmp_path / f"cell {number}", Resources(cpus=1)))
    assert len(submitted) == 1  # one at a time
    (first,), (second,) = executor.ended(1.0), executor.ended(1.0)
    assert "no folder" in str(first.fault)
    assert second.fault == "Slurm lost it: node 7 is gone and its log with it"
    assert [job.threads for job in submitted] == [1, 1]
    assert executor.ended(0.0) == []


@pytest.mark.slow
def test_a_job_that_its_time_limit_ends_is_queued_again_and_goes_on(
    tmp_path: Path, small: Callable[..., Any]
) -> None:
    config = small({"method": "seq_ft", "seed": 1}, train={"epochs": 40, "batch_size": 4})[0]
    executor = SlurmExecutor(tmp_path, "local")
    executor.submit(Job(config, tmp_path / "cell"))
    while not (tmp_path / "cell" / "CURRENT").exists():
        time.sleep(0.1)
    number = (tmp_path / "cell" / LOG).read_text().partition("process ")[2].partition(",")[0]
    os.kill(int(number), signal.SIGUSR2)  # what Slurm sends some time before the limit
    over: list[Any] = []
    while not over:
        over = executor.ended(1.0)
    assert over[0].fault is None
    log = (tmp_path / "cell" / LOG).read_text()
    assert log.count(", process ") == 2
    assert "after task " in log


def test_what_is_missing_or_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CofimaError, match="there is no sbatch on this machine"):
        SlurmExecutor(tmp_path)
    with pytest.raises(CofimaError, match="only 'local' is known"):
        SlurmExecutor(tmp_path, "there")
    executor = SlurmExecutor(tmp_path, "local")
    with pytest.raises(CofimaError, match=r"resources\.slurm"):
        executor.submit(Job(tiny.config(), tmp_path / "x", Resources(slurm={"hours": 3})))
