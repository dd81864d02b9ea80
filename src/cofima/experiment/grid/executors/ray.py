"""Cells on a Ray cluster; the cell of a lost node goes on elsewhere, from what its folder holds.

Every node must see the working folder, the run folders and the data under the same paths, and have
cofima installed.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from cofima.core.errors import CofimaError
from cofima.experiment.grid.executors.base import Ended, Job

RETRIES = 5  # times that a cell may lose its node or its process
PASSED_ON = ("COFIMA_", "HF_", "OMP_")  # variables of this process that its cells need too


class OnRay:
    """Ray tasks, one for each job; with ``jobs``, so many at a time."""

    def __init__(self, address: str | None = None, jobs: int | None = None) -> None:
        self.ray = _ray()
        self.slots: int | None = jobs
        self.started = not self.ray.is_initialized()
        if self.started:
            self._connect(address)
        self.queue: list[Job] = []
        self.running: dict[Any, Job] = {}

    def _connect(self, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a grid tells nobody of itself
        passed = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
        try:
            self.ray.init(
                address=address or "local",  # without it Ray would join whatever cluster it finds
                runtime_env={"env_vars": passed},
                log_to_driver=False,
                logging_level="error",
                **({} if address else {"include_dashboard": False}),
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise CofimaError(
                f"--address {address}: no Ray cluster answers ({error}); "
                "start one with: ray start --head, or leave --address out"
            ) from error

    def submit(self, job: Job) -> None:
        """Hand the job to the cluster, or keep it until there is room for it."""
        self.queue.append(job)
        self._deal()

    def ended(self, seconds: float) -> list[Ended]:
        """Wait for the first task that is over."""
        if not self.running:
            return []
        found: list[Ended] = []
        over, _ = self.ray.wait(list(self.running), num_returns=1, timeout=seconds)
        for reference in over:
            job = self.running.pop(reference)
            found.append(Ended(job, self._fault(reference)))
        self._deal()
        return found

    def stop(self) -> None:
        """Cancel what runs, and leave the cluster."""
        self.queue.clear()
        for reference in self.running:
            self.ray.cancel(reference, force=True)
        self.running.clear()
        if self.started:
            self.ray.shutdown()

    def _deal(self) -> None:
        while self.queue and (self.slots is None or len(self.running) < self.slots):
            job = self.queue.pop(0)
            needs = job.resources
            cpus = needs.cpus or 1
            how: dict[str, Any] = {"num_cpus": cpus, "num_gpus": needs.gpus, "max_retries": RETRIES}
            if needs.memory_gb is not None:
                how["memory"] = int(needs.memory_gb * 1e9)
            task = self.ray.remote(_learn).options(**how)
            self.running[task.remote(replace(job, threads=cpus), str(Path.cwd()))] = job

    def _fault(self, reference: Any) -> str | None:
        try:
            fault: str | None = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:  # not the cell, but what should have begun it
            return f"its node could not begin it: {str(error).strip().splitlines()[-1]}"
        except self.ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            return f"Ray lost it {RETRIES + 1} times ({lines[0] if lines else type(error).__name__})"
        return fault


def _learn(job: Job, place: str) -> str | None:
    """Learn a job in a process of the cluster, where relative paths mean the same as here."""
    os.chdir(place)
    from cofima.experiment.grid.worker import learn

    return learn(job)


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise CofimaError("--engine ray needs Ray: pip install 'cofima[ray]'") from error
    return ray
