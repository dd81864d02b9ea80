"""The interface of methods that average weights after each task, by which analyses average them anew."""

from abc import ABC, abstractmethod
from typing import ClassVar

from cofima.data.stream import Task
from cofima.weights.ops import Weights


class Averaging(ABC):
    """A method that ends a task by averaging the trained weights with earlier ones.

    Name it before the class of the method among the bases: it is what ends a task.
    """

    with_start: ClassVar[bool] = False
    """True if the average is with the weights before the first task instead of those before this task."""

    @property
    def restarts(self) -> bool:
        """True if the training of each task starts from the weights before the first."""
        return False

    @property
    def by_fisher(self) -> bool:
        """True if :meth:`trained_fisher` measures anything."""
        return False

    @property
    def old_fisher(self) -> Weights:
        """Fisher information kept from the tasks before."""
        return {}

    def end(self, task: Task) -> None:
        """Finish the task at the method's own share."""
        fisher = self.trained_fisher(task)
        self.finish(task, self.share(task, fisher), fisher)

    def trained_fisher(self, task: Task) -> Weights:
        """Measure the Fisher information of the trained weights that the average needs."""
        return {}

    @abstractmethod
    def share(self, task: Task, fisher: Weights) -> float:
        """Return the share of the trained weights in the average."""

    @abstractmethod
    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """End a task whose training is over.

        Args:
            task: The task.
            lam: Share of the trained weights.
            fisher: What :meth:`trained_fisher` returned.
            last: No task follows: leave out what only the next one needs.
        """
