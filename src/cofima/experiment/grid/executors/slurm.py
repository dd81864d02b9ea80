"""Cells as Slurm jobs, via submitit; a job that reaches its time limit is requeued and resumes."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cofima.core.errors import CofimaError
from cofima.core.extras import import_extra
from cofima.experiment.grid.executors.base import Ended, Executor, Job

MINUTES = 24 * 60  # default time limit; submitit's own is 5 minutes
REQUEUES = 50  # maximum restarts of a job that reaches its time limit
FOLDER = ".slurm"  # submitit's files, below the grid's folder


class SlurmExecutor(Executor):
    """Executor that submits one Slurm job per job; ``jobs`` limits their number at a time."""

    def __init__(self, out: Path, address: str | None = None, jobs: int | None = None) -> None:
        super().__init__(jobs)
        self.submitit = import_extra("submitit", "slurm")
        if address not in (None, "local"):
            raise CofimaError(f"--address {address}: with --executor slurm only 'local' is known")
        if address is None and shutil.which("sbatch") is None:
            raise CofimaError(
                "--executor slurm: there is no sbatch on this machine; run it where jobs are submitted, "
                "or try it without Slurm: --executor slurm --address local"
            )
        self.cluster = address or "slurm"
        self.folder = (out / FOLDER).absolute()
        self.running: list[tuple[Any, Job]] = []

    def start(self, job: Job) -> None:
        """Submit the job to Slurm with its resources."""
        needs = job.resources
        again = {f"{self.cluster}_max_num_timeout": REQUEUES}
        executor = self.submitit.AutoExecutor(folder=self.folder, cluster=self.cluster, **again)
        how: dict[str, Any] = {"cpus_per_task": needs.cpus or 1, "name": job.folder.name[:40]}
        how |= {"timeout_min": MINUTES}
        how |= {"gpus_per_node": int(needs.gpus)} if needs.gpus else {}
        how |= {"mem_gb": needs.memory_gb} if needs.memory_gb is not None else {}
        try:
            executor.update_parameters(**(how | needs.slurm))
        except (TypeError, ValueError, NameError) as error:
            raise CofimaError(f"resources.slurm: {error}") from error
        handle = executor.submit(SlurmCell(self.submitit), replace(job, threads=needs.cpus or 1))
        self.running.append((handle, job))

    def ended(self, seconds: float) -> list[Ended]:
        """Poll for jobs that have ended."""
        until = time.monotonic() + seconds
        while True:
            over = [pair for pair in self.running if pair[0].done()]
            if over or time.monotonic() >= until:
                break
            time.sleep(min(0.2, seconds))
        self.running = [pair for pair in self.running if pair not in over]
        self.start_queued()
        return [Ended(job, self._fault(handle)) for handle, job in over]

    def stop(self) -> None:
        """Cancel all jobs."""
        self.queue.clear()
        for handle, _ in self.running:
            handle.cancel()
        self.running.clear()

    def _fault(self, handle: Any) -> str | None:
        try:
            fault: str | None = handle.result()
        except Exception as error:  # submitit's errors have no common base class
            lines = [text for text in str(error).splitlines() if text.strip()]
            return f"Slurm lost it: {' '.join(lines[:2]) or type(error).__name__}"
        return fault


class SlurmCell:
    """Callable of a Slurm job, with submitit's protocol for requeued jobs."""

    def __init__(self, submitit: Any) -> None:
        self.requeue = submitit.helpers.DelayedSubmission

    def __call__(self, job: Job) -> str | None:
        """Run the job in the process that Slurm has started."""
        from cofima.experiment.grid.worker import learn

        return learn(job)

    def checkpoint(self, job: Job) -> Any:
        """Return the same job for requeueing; it resumes from its folder."""
        return self.requeue(self, job)
