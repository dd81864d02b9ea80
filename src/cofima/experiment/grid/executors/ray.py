"""Cells on a Ray cluster; if a node is lost, its cells resume from their folders on another node.

Every node must have cofima installed, and the working folder, the run folders and the data must have the same
paths on all nodes.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from cofima.core.errors import CofimaError
from cofima.core.extras import import_extra
from cofima.experiment.grid.executors.base import Ended, Executor, Job

RETRIES = 5  # restarts of a cell that lost its node or its process
PASSED_ON = ("COFIMA_", "HF_", "OMP_")  # prefixes of environment variables that cells need too


class RayExecutor(Executor):
    """Executor that submits one Ray task per job; ``jobs`` limits their number at a time."""

    def __init__(self, address: str | None = None, jobs: int | None = None) -> None:
        super().__init__(jobs)
        self.ray = import_extra("ray", "ray")
        self.connected = not self.ray.is_initialized()  # disconnect only if we connected
        if self.connected:
            self._connect(address)
        self.running: dict[Any, Job] = {}

    def _connect(self, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports to the vendor
        passed = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
        try:
            self.ray.init(
                address=address or "local",  # the default would join any cluster it finds
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

    def start(self, job: Job) -> None:
        """Submit the job to the cluster with its resources."""
        needs = job.resources
        cpus = needs.cpus or 1
        how: dict[str, Any] = {"num_cpus": cpus, "num_gpus": needs.gpus, "max_retries": RETRIES}
        if needs.memory_gb is not None:
            how["memory"] = int(needs.memory_gb * 1e9)
        task = self.ray.remote(_learn).options(**how)
        self.running[task.remote(replace(job, threads=cpus), str(Path.cwd()))] = job

    def ended(self, seconds: float) -> list[Ended]:
        """Wait for the first Ray task that has ended."""
        if not self.running:
            return []
        over, _ = self.ray.wait(list(self.running), num_returns=1, timeout=seconds)
        found = [Ended(self.running.pop(reference), self._fault(reference)) for reference in over]
        self.start_queued()
        return found

    def stop(self) -> None:
        """Cancel all tasks, and disconnect."""
        self.queue.clear()
        for reference in self.running:
            self.ray.cancel(reference, force=True)
        self.running.clear()
        if self.connected:
            self.ray.shutdown()

    def _fault(self, reference: Any) -> str | None:
        try:
            fault: str | None = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:  # raised before the cell started
            return f"its node could not begin it: {str(error).strip().splitlines()[-1]}"
        except self.ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            return f"Ray lost it {RETRIES + 1} times ({lines[0] if lines else type(error).__name__})"
        return fault


def _learn(job: Job, place: str) -> str | None:
    """Run a job in a process of the cluster, in the working folder of this process."""
    os.chdir(place)
    from cofima.experiment.grid.worker import learn

    return learn(job)
