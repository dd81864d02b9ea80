"""Base class of executors, and the jobs that they run."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cofima.experiment.grid.resources import Resources
from cofima.store.config import Config


@dataclass(frozen=True, eq=False)
class Job:
    """One model folder to learn.

    Attributes:
        config: The configuration.
        folder: The model folder.
        resources: Resources to reserve.
        tasks: Number of tasks to learn; None for all.
        first: A folder with the same first task already learned, to start from.
        threads: Number of threads; None leaves it to the executor.
    """

    config: Config
    folder: Path
    resources: Resources = field(default_factory=Resources)
    tasks: int | None = None
    first: Path | None = None
    threads: int | None = None


class Ended(NamedTuple):
    """A job that has ended, and its error message if it failed."""

    job: Job
    fault: str | None


class Executor(ABC):
    """Runs jobs outside this process.

    An executor reports only the end of a job: progress is read from the job's folder, which has a checkpoint
    after every task. So a new executor has little to implement.

    Attributes:
        slots: Maximum number of concurrent jobs, or None.
        queue: Jobs that wait for a slot.
        running: Jobs that have been started.
    """

    running: Collection[Any]

    def __init__(self, slots: int | None) -> None:
        self.slots = slots
        self.queue: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        """Accept a job, and start it as soon as a slot is free."""
        self.queue.append(job)
        self.start_queued()

    def start_queued(self) -> None:
        """Start queued jobs while slots are free."""
        while self.queue and self.has_room():
            self.start(self.queue.popleft())

    def has_room(self) -> bool:
        """Return True if another job can be started now; without a limit, the cluster does the queueing."""
        return self.slots is None or len(self.running) < self.slots

    @abstractmethod
    def start(self, job: Job) -> None:
        """Start a job."""

    @abstractmethod
    def ended(self, seconds: float) -> list[Ended]:
        """Return the jobs that ended since the last call; wait up to ``seconds`` for the first."""

    @abstractmethod
    def stop(self) -> None:
        """Stop all jobs."""
