"""Cells as jobs of Slurm, through submitit; a job that its time limit ends is queued again and goes on."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cofima.core.errors import CofimaError
from cofima.experiment.grid.executors.base import Ended, Job

MINUTES = 24 * 60  # submitit's own limit, 5 minutes, is for trials
REQUEUES = 50  # times that the time limit may end a job
FOLDER = ".slurm"  # below the grid's own: what submitit keeps of its jobs


class OnSlurm:
    """One job of Slurm for each job; with ``jobs``, so many at a time."""

    def __init__(self, out: Path, address: str | None = None, jobs: int | None = None) -> None:
        self.submitit = _submitit()
        if address not in (None, "local"):
            raise CofimaError(f"--address {address}: with --engine slurm only 'local' is known")
        if address is None and shutil.which("sbatch") is None:
            raise CofimaError(
                "--engine slurm: there is no sbatch on this machine; run it where jobs are submitted, "
                "or try it without Slurm: --engine slurm --address local"
            )
        self.cluster = address or "slurm"
        self.folder = (out / FOLDER).absolute()
        self.slots: int | None = jobs
        self.queue: list[Job] = []
        self.running: list[tuple[Any, Job]] = []

    def submit(self, job: Job) -> None:
        """Queue the job in Slurm, or keep it until there is room for it."""
        self.queue.append(job)
        self._deal()

    def ended(self, seconds: float) -> list[Ended]:
        """Ask for the jobs that are over."""
        until = time.monotonic() + seconds
        while True:
            over = [pair for pair in self.running if pair[0].done()]
            if over or time.monotonic() >= until:
                break
            time.sleep(min(0.2, seconds))
        self.running = [pair for pair in self.running if pair not in over]
        self._deal()
        return [Ended(job, self._fault(handle)) for handle, job in over]

    def stop(self) -> None:
        """Cancel what is queued or runs."""
        self.queue.clear()
        for handle, _ in self.running:
            handle.cancel()
        self.running.clear()

    def _deal(self) -> None:
        while self.queue and (self.slots is None or len(self.running) < self.slots):
            job = self.queue.pop(0)
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
            handle = executor.submit(Learner(self.submitit), replace(job, threads=needs.cpus or 1))
            self.running.append((handle, job))

    def _fault(self, handle: Any) -> str | None:
        try:
            fault: str | None = handle.result()
        except Exception as error:  # submitit's own errors have no common class
            lines = [text for text in str(error).splitlines() if text.strip()]
            return f"Slurm lost it: {' '.join(lines[:2]) or type(error).__name__}"
        return fault


class Learner:
    """What a job of Slurm does, and how it is queued again when its time is up."""

    def __init__(self, submitit: Any) -> None:
        self.again = submitit.helpers.DelayedSubmission

    def __call__(self, job: Job) -> str | None:
        """Learn the job in the process that Slurm has started."""
        from cofima.experiment.grid.worker import learn

        return learn(job)

    def checkpoint(self, job: Job) -> Any:
        """Return what goes on: the same job, from what its folder holds."""
        return self.again(self, job)


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise CofimaError("--engine slurm needs submitit: pip install 'cofima[slurm]'") from error
    return submitit
