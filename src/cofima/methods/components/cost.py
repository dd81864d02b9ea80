"""Cost of a run in images passed through the network, for a rough estimate of its time.

Only the network is counted; alignment, ridge regression and file reading are small in comparison.
"""

from dataclasses import dataclass

from cofima.core.progress import STEP

FISHER_PASS = 1.3  # cost of an image in an exact Fisher pass, relative to a training step


@dataclass(frozen=True)
class Plan:
    """Size of a run: total numbers of images; tasks are assumed to be equally large."""

    epochs: int
    train: int
    test: int
    tasks: int
    solved_rows: bool = False  # head_init=lda: features are computed before training, too

    @property
    def later(self) -> float:
        """Training images of all tasks except the first."""
        return self.train * (self.tasks - 1) / self.tasks


@dataclass(frozen=True)
class Cost:
    """Cost of a whole run: images in training steps, and images in forward-only passes."""

    steps: float
    forward: float

    @property
    def work(self) -> float:
        """Total cost in forward passes."""
        return STEP * self.steps + self.forward

    def plus(self, steps: float = 0, forward: float = 0) -> "Cost":
        """Return this cost plus another."""
        return Cost(self.steps + steps, self.forward + forward)
