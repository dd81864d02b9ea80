"""The cost of a run in images that pass through the network, for a first estimate of its time.

Only the network counts; alignment, ridge regressions and the reading of files are small beside it.
"""

from dataclasses import dataclass

from cofima.core.progress import STEP

FISHER_PASS = 1.3  # one image's part in an exact Fisher pass, in training steps


@dataclass(frozen=True)
class Plan:
    """The size of a run: images of all its tasks together, which are taken to be equally large."""

    epochs: int
    train: int
    test: int
    tasks: int

    @property
    def later(self) -> float:
        """Training images of all tasks but the first."""
        return self.train * (self.tasks - 1) / self.tasks


@dataclass(frozen=True)
class Cost:
    """Images in training steps, and images that pass forward only, over a whole run."""

    steps: float
    forward: float

    @property
    def work(self) -> float:
        """All of it in forward passes."""
        return STEP * self.steps + self.forward

    def plus(self, steps: float = 0, forward: float = 0) -> "Cost":
        """Return this and more."""
        return Cost(self.steps + steps, self.forward + forward)
