"""Cells on a Ray cluster: a real one of two nodes on this machine, one of which is lost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cofima.core.errors import CofimaError
from cofima.experiment.grid.cells import name
from cofima.experiment.grid.executors.ray import RayExecutor
from cofima.experiment.grid.scheduler import run_grid
from cofima.experiment.grid.status import GridStatus
from cofima.experiment.grid.worker import LOG

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a cluster whose head computes nothing."""
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


def test_a_cluster_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(**_: Any) -> None:
        raise ConnectionError("could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(CofimaError, match=r"--address auto: no Ray cluster answers .could not find"):
        RayExecutor("auto")


def test_a_grid_runs_on_ray(
    tmp_path: Path,
    small: Callable[..., Any],
    learned_here: Callable[..., None],
    same_cells: Callable[..., None],
) -> None:
    found = small({"method": "coma", "seed": 1})
    outcome = run_grid(found, tmp_path / "ray", executor=RayExecutor(jobs=1))
    assert not outcome.failed
    learned_here(found, tmp_path / "here")
    same_cells(outcome.done, tmp_path / "here")
