"""Cost of scheduling: 24 short cells on two processes of one thread each, over the sum of their own times.

python benchmarks/grid.py prints the section; `make bench` writes it into RESULTS.md.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from cofima.experiment.config import check
from cofima.experiment.grid.cells import name
from cofima.experiment.grid.executors.base import Job
from cofima.experiment.grid.executors.local import LocalExecutor
from cofima.experiment.grid.scheduler import run_grid
from cofima.store.config import Config

CELLS, PROCESSES = 24, 2
TARGET = 0.10


def cells() -> list[Config]:
    """Return cells of a few seconds each on a core of its own; no two share a first task."""
    values: dict[str, Any] = {
        "dataset": "digits",
        "data": {"max_train_per_class": 40},
        "stream": {"base_classes": 5, "increment": 5},
        "train": {"epochs": 1, "batch_size": 24},
        "method": "seq_ft",
        "device": "cpu",
    }
    return [check(values | {"seed": seed}) for seed in range(CELLS)]


def main() -> str:
    found = cells()
    with tempfile.TemporaryDirectory() as place:
        executor = LocalExecutor(PROCESSES, threads=1)
        wake(executor, found[:PROCESSES], Path(place) / "first")
        before = len(executor.seconds)
        start = time.perf_counter()
        outcome = run_grid(found, Path(place) / "grid", executor=executor)
        wall = time.perf_counter() - start
    assert len(outcome.done) == CELLS, outcome.failed
    own = executor.seconds[before:]
    lost = 1 - sum(own) / (PROCESSES * wall)
    lines = [
        "## A grid of short cells",
        "",
        f"{CELLS} cells (`seq_ft` on the digits, two tasks, one epoch) on {PROCESSES} processes of one",
        f"thread each that are already running: the share of {PROCESSES} x wall time in which no cell was",
        f"being learned. A cell took {statistics.median(own):.1f} s (median); starting a process, once for",
        f"all of its cells, took {max(executor.startups):.1f} s. All times are wall time: on a busy machine",
        "the seconds grow, but the share hardly changes.",
        "",
        "| | share | target |",
        "|---|---|---|",
        f"| lost to scheduling | {100 * lost:.1f} % | <= {100 * TARGET:.0f} % |",
        "",
    ]
    return "\n".join(lines)


def wake(executor: LocalExecutor, some: list[Config], out: Path) -> None:
    """Start the processes, and let each learn one cell: imports and caches are paid for once."""
    for config in some:
        executor.submit(Job(config, out / name(config)))
    over = 0
    while over < len(some):
        over += len(executor.ended(1.0))


if __name__ == "__main__":
    print(main())
