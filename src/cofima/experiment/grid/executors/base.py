"""What runs jobs, whoever it is: take one, say which have ended."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from cofima.experiment.grid.resources import Resources
from cofima.store.config import Config


@dataclass(frozen=True, eq=False)
class Job:
    """One model folder to learn.

    Attributes:
        tasks: How many tasks to learn; None for all of them.
        first: A folder that has learned the same first task, to begin from.
        threads: How many threads to compute with; None leaves it to the engine.
    """

    config: Config
    folder: Path
    resources: Resources = field(default_factory=Resources)
    tasks: int | None = None
    first: Path | None = None
    threads: int | None = None


class Ended(NamedTuple):
    """A job that is over, and what went wrong in it."""

    job: Job
    fault: str | None


class Engine(Protocol):
    """Something that learns jobs beside this process.

    A folder's state is on disk after every task, where everybody can read it: an engine need not say how
    far a job is, only when it is over.
    """

    @property
    def slots(self) -> int | None:
        """Return how many jobs run at a time, where that is known."""

    def submit(self, job: Job) -> None:
        """Take a job, to be begun as soon as there is room."""

    def ended(self, seconds: float) -> list[Ended]:
        """Return the jobs that ended since the last call; wait so long for the first of them."""

    def stop(self) -> None:
        """End everything that still runs."""
