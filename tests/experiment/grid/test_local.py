"""The local executor: reused processes are stateless, and a dying one fails only its own job."""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cofima import methods
from cofima.core import lock
from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.experiment.grid import shared_first_task, worker
from cofima.experiment.grid.cells import name
from cofima.experiment.grid.executors import make
from cofima.experiment.grid.executors.base import Job
from cofima.experiment.grid.executors.local import READY, LocalExecutor, Worker
from cofima.experiment.grid.scheduler import run_grid
from cofima.experiment.grid.shared_first_task import FOLDER
from cofima.experiment.grid.status import GridStatus
from cofima.experiment.grid.worker import LOG, learn
from cofima.experiment.launch import pending
from cofima.methods import Method
from cofima.store import model_folder
from cofima.store.config import Config

# averages with Fisher information, fixed features behind adapters, a memory, and no tasks at all
KINDS = ["cofima", "ranpac", "der_pp", "joint"]
Make = Callable[..., list[Config]]
Learn = Callable[[Sequence[Config], Path], None]
Same = Callable[[Sequence[Path], Path], None]


def finish(executor: LocalExecutor, jobs: list[Job]) -> dict[Path, str | None]:
    """Run jobs to their ends, one after the other in the order of the list."""
    over: dict[Path, str | None] = {}
    try:
        for job in jobs:
            executor.submit(job)
        until = time.monotonic() + 600
        while len(over) < len(jobs) and time.monotonic() < until:
            over |= {job.folder: fault for job, fault in executor.ended(1.0)}
    finally:
        executor.stop()
    return over


@pytest.mark.parametrize("start", ["forked", pytest.param("spawned", marks=pytest.mark.slow)])
def test_a_warm_process_learns_what_another_learns(
    start: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    small: Make,
    learned_here: Learn,
    same_cells: Same,
) -> None:
    """Two processes learn the same cells in opposite orders: what a cell leaves behind would show.

    The workers of users are spawned: by a Python that has imported nothing.
    """
    if start == "forked":
        request.getfixturevalue("forked_workers")
    found = small({"method": KINDS, "seed": 1})
    over = finish(
        LocalExecutor(1, threads=1), [Job(config, tmp_path / "warm" / name(config)) for config in found]
    )
    assert set(over.values()) == {None}
    learned_here(found, tmp_path / "here")
    same_cells(list(over), tmp_path / "here")
    logs = [(folder / LOG).read_text() for folder in over]
    assert len({log.partition("process ")[2].partition(",")[0] for log in logs}) == 1  # it was one process


@pytest.mark.slow
@pytest.mark.parametrize("method", methods.names())
def test_every_method_is_the_same_in_a_fresh_process(
    method: str, tmp_path: Path, small: Make, same_cells: Same
) -> None:
    before, config = small({"method": "cofima", "seed": 2})[0], small({"method": method, "seed": 1})[0]
    warm = [Job(before, tmp_path / "other" / name(before)), Job(config, tmp_path / "warm" / name(config))]
    fresh = [Job(config, tmp_path / "fresh" / name(config))]
    assert set((finish(LocalExecutor(1), warm) | finish(LocalExecutor(1), fresh)).values()) == {None}
    same_cells([tmp_path / "warm" / name(config)], tmp_path / "fresh")


class Ears(Progress):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def say(self, message: str) -> None:
        self.heard.append(message)


@pytest.mark.usefixtures("forked_workers")
def test_a_process_that_is_killed_costs_its_own_cell_and_the_same_call_mends_it(
    tmp_path: Path, small: Make
) -> None:
    """The longest cell's process is killed; the other cell, in the process that follows it, is learned."""
    long = small({"method": "seq_ft", "seed": 1}, train={"epochs": 10**6, "batch_size": 16})[0]
    other = small({"method": "prototype", "seed": 1})[0]
    executor = LocalExecutor(1, devices=["7"], threads=1)

    def kill(seen: GridStatus) -> None:
        row = seen.rows[tmp_path / name(long)]
        if row.state == "running":
            os.kill(executor.workers[0].process.pid or 0, signal.SIGKILL)

    outcome = run_grid([long, other], tmp_path, executor=executor, watch=kill)
    assert [folder.name for folder in outcome.done] == [name(other)]
    ((folder, fault),) = outcome.failed.items()
    assert folder.name == name(long)
    assert "killed by SIGKILL" in fault
    assert "--jobs" in fault
    assert "CUDA_VISIBLE_DEVICES=7" in (tmp_path / name(other) / LOG).read_text()  # the place is taken over


@pytest.mark.usefixtures("forked_workers")
def test_a_first_task_is_learned_once_and_failures_have_a_log(
    tmp_path: Path, small: Make, learned_here: Learn, same_cells: Same
) -> None:
    found = small([{"method": "coma", "options.lam": [0.2, 0.8], "seed": 1}, {"method": "slca", "seed": 1}])
    broken = found[0].model_copy(update={"dataset": f"folder:{tmp_path / 'gone'}", "seed": 5})
    ears = Ears()
    outcome = run_grid(
        [*found, broken], tmp_path / "shared", progress=ears, executor=LocalExecutor(1, threads=1)
    )
    assert sorted(folder.name for folder in outcome.done) == sorted(map(name, found))
    learned_here(found, tmp_path / "alone")
    same_cells(outcome.done, tmp_path / "alone")
    assert sum("first task shared" in line for line in ears.heard) <= 3
    assert all("taken over" in (folder / LOG).read_text() for folder in outcome.done)
    assert any(line.startswith("first task of 3 cells") and "done" in line for line in ears.heard)
    assert not (tmp_path / "shared" / FOLDER).exists()  # nobody needs it any more
    ((folder, fault),) = outcome.failed.items()
    assert "no folder" in fault
    assert fault in (folder / LOG).read_text()
    assert model_folder.current(folder) is None
    assert "cells: 3 done, 0 running, 0 waiting, 1 failed" in ears.heard[-1]


def test_a_cell_that_is_ended_writes_down_how_far_it_is(
    tmp_path: Path, small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config,) = small({"method": ["seq_ft"]})
    with monkeypatch.context() as patch:
        patch.setattr(Method, "after_step", lambda *_: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit) as ended:
            learn(Job(config, tmp_path / "cell"))
    assert ended.value.code == 128 + signal.SIGTERM
    said = pending(tmp_path / "cell")
    assert (said["task"], said["epoch"], said["step"]) == (0, 0, 1)
    assert "interrupted; the same command continues at task 1, epoch 1, step 1" in log_of(tmp_path / "cell")
    assert learn(Job(config, tmp_path / "cell")) is None
    assert "at task 1, epoch 1, step 1" in log_of(tmp_path / "cell")


def log_of(folder: Path) -> str:
    return (folder / LOG).read_text()


def test_a_damaged_folder_fails_and_a_damaged_first_task_is_learned_anew(tmp_path: Path, small: Make) -> None:
    (config,) = small({"method": "slca", "seed": 1})
    (tmp_path / name(config)).mkdir()
    (tmp_path / name(config) / "CURRENT").write_text("0009")
    outcome = run_grid([config], tmp_path)
    assert "names '0009', which is not there" in outcome.failed[tmp_path / name(config)]
    first = tmp_path / FOLDER / str(shared_first_task.key(config))
    (first / "0001").mkdir(parents=True)
    (first / "CURRENT").write_text("0001")
    assert learn(Job(config, tmp_path / "cell", first=first, threads=1)) is None
    assert "learned here once more" in (tmp_path / "cell" / LOG).read_text()
    assert model_folder.finished(tmp_path / "cell")


def test_a_folder_that_another_process_holds_is_left_alone(
    tmp_path: Path, small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config,) = small({"method": "prototype", "seed": 1})
    monkeypatch.setattr(worker, "PATIENCE", 0.0)
    with (tmp_path / lock.NAME).open("w") as other:  # an open file of its own holds, as a process does
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "is being written by another process" in str(learn(Job(config, tmp_path, threads=1)))
    assert model_folder.current(tmp_path) is None
    assert learn(Job(config, tmp_path, threads=1)) is None


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each worker is a Python of its own")
def test_workers_are_forked_from_one_process_that_started_before_their_jobs() -> None:
    executor = LocalExecutor(2, threads=1)
    executor.warm_up()
    assert not executor.workers
    both = [Worker(None), Worker(None)]
    try:
        parents = {Path(f"/proc/{one.process.pid}/stat").read_text().split()[3] for one in both}
        assert len(parents) == 1
        assert str(os.getpid()) not in parents
        assert [one.pipe.recv() for one in both] == [READY, READY]
    finally:
        executor.workers += both
        executor.stop()


def test_executors_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match="--address somewhere: is for --executor ray or slurm"):
        make("local", tmp_path, 1, "somewhere", [])
