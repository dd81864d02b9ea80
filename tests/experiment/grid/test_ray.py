"""Cells on a Ray cluster: what is asked of Ray, and a real cluster here that loses a node."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cofima.core.errors import CofimaError
from cofima.experiment.grid.cells import Resources, name
from cofima.experiment.grid.executors import ray as module
from cofima.experiment.grid.executors.base import Job
from cofima.experiment.grid.executors.ray import RayExecutor
from cofima.experiment.grid.scheduler import run_grid
from cofima.experiment.grid.status import GridStatus
from cofima.experiment.grid.worker import LOG

pytestmark = pytest.mark.filterwarnings("ignore")


class LostError(Exception):
    """What Ray raises for a task whose node or process is gone."""


class NotBegunError(LostError):
    """What Ray raises where a task fails before a cell begins."""


class Here:
    """What the executor uses of Ray, in this process: a task runs when its result is taken."""

    exceptions = SimpleNamespace(RayError=LostError, RayTaskError=NotBegunError)

    def __init__(self) -> None:
        self.connected: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.faults: list[Exception] = []

    def is_initialized(self) -> bool:
        return bool(self.connected)

    def init(self, **how: Any) -> None:
        self.connected.append(how)

    def shutdown(self) -> None:
        self.connected.clear()

    def remote(self, function: Callable[..., Any]) -> Any:
        def options(**how: Any) -> Any:
            self.asked.append(how)
            return SimpleNamespace(remote=partial(partial, function))

        return SimpleNamespace(options=options)

    def wait(self, tasks: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return tasks[:num_returns], tasks[num_returns:]

    def get(self, task: Callable[[], Any]) -> Any:
        if self.faults:
            raise self.faults.pop(0)
        return task()

    def cancel(self, task: Any, force: bool) -> None:
        assert force


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Put this process in the place of a cluster."""
    made = Here()
    monkeypatch.setattr(module, "import_extra", lambda *_: made)
    return made


def test_a_grid_runs_with_what_it_asks_of_ray(
    tmp_path: Path,
    small: Callable[..., Any],
    learned_here: Callable[..., None],
    same_cells: Callable[..., None],
    here: Here,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COFIMA_DATA", "there")
    found = small({"method": "coma", "seed": 1})
    executor = RayExecutor(jobs=1)
    assert here.connected[0]["address"] == "local"
    assert here.connected[0]["runtime_env"]["env_vars"]["COFIMA_DATA"] == "there"
    outcome = run_grid(found, tmp_path / "ray", executor=executor)
    assert not outcome.failed
    learned_here(found, tmp_path / "here")
    same_cells(outcome.done, tmp_path / "here")
    assert here.asked == [{"num_cpus": 1, "num_gpus": 0.0, "max_retries": 5}]
    assert not here.connected  # it was by us


def test_a_cell_that_ray_loses_says_so(tmp_path: Path, small: Callable[..., Any], here: Here) -> None:
    (config,) = small({"method": "seq_ft", "seed": 1})
    here.init(address="elsewhere")  # by the user
    executor = RayExecutor(jobs=1)
    here.faults = [NotBegunError("where\nno such module"), LostError("the node died\nlater")]
    for number in range(3):
        needs = Resources(cpus=2, gpus=0.5, memory_gb=1.0)
        executor.submit(Job(config, tmp_path / f"cell {number}", needs))
    assert len(here.asked) == 1  # one at a time
    (first,), (second,) = executor.ended(1.0), executor.ended(1.0)
    assert first.fault == "its node could not begin it: no such module"
    assert second.fault == "Ray lost it 6 times (the node died)"
    assert here.asked == [{"num_cpus": 2, "num_gpus": 0.5, "max_retries": 5, "memory": 10**9}] * 3
    executor.stop()
    assert executor.ended(1.0) == []
    assert here.connected  # the user's connection stays


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a cluster whose head computes nothing."""
    ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_DISABLE_MEMORY_MONITOR", "1")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.slow
def test_the_cells_of_a_lost_node_go_on_elsewhere(
    cluster: Any,
    tmp_path: Path,
    small: Callable[..., Any],
    learned_here: Callable[..., None],
    same_cells: Callable[..., None],
) -> None:
    """One node is lost when its first cell has learned a task; the other ends it, with the same bits."""
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    found = small({"method": "seq_ft", "seed": [1, 2, 3]}, train={"epochs": 60, "batch_size": 4})
    lost: list[str] = []

    def lose(seen: GridStatus) -> None:
        begun = [row for row in seen.rows.values() if row.state == "running" and row.task == 1]
        if begun and not lost:
            lost.append(begun[0].name)
            cluster.remove_node(_node_of(begun[0].folder / LOG, nodes), allow_graceful=False)

    executor = RayExecutor(cluster.address)
    outcome = run_grid(found, tmp_path / "ray", executor=executor, watch=lose)
    assert not outcome.failed
    assert lost
    log = (tmp_path / "ray" / lost[0] / LOG).read_text()
    assert log.count(", process ") >= 2  # it was begun twice,
    assert "after task " in log  # the second time from what its folder held
    learned_here([config for config in found if name(config) == lost[0]], tmp_path / "here")
    same_cells([tmp_path / "ray" / lost[0]], tmp_path / "here")


def _node_of(log: Path, nodes: list[Any]) -> Any:
    """Return the node whose process writes a log."""
    number = int(log.read_text().rpartition("process ")[2].partition(",")[0])
    parents = set()
    while number > 1:
        parents.add(number)
        number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
    for node in nodes:
        (raylet,) = node.all_processes["raylet"]
        if raylet.process.pid in parents:
            return node
    raise AssertionError(f"no node has the process {parents}")


def test_a_cluster_that_is_not_there_is_said(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(**_: Any) -> None:
        raise ConnectionError("could not find any running Ray instance")

    monkeypatch.setattr(here, "init", nobody)
    with pytest.raises(CofimaError, match=r"--address auto: no Ray cluster answers .could not find"):
        RayExecutor("auto")


@pytest.mark.slow
def test_a_grid_runs_on_ray(
    tmp_path: Path,
    small: Callable[..., Any],
    learned_here: Callable[..., None],
    same_cells: Callable[..., None],
) -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    found = small({"method": "coma", "seed": 1})
    outcome = run_grid(found, tmp_path / "ray", executor=RayExecutor(jobs=1))
    assert not outcome.failed
    learned_here(found, tmp_path / "here")
    same_cells(outcome.done, tmp_path / "here")
