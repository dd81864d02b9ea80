"""What the batch loop tells of how far it is, without knowing whether anybody keeps it."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Learner(Protocol):
    """What is in training: a method, and what changes in it from step to step beside the network."""

    def midway(self) -> dict[str, Tensor]:
        """Return what the steps so far have changed in the method itself."""

    def restore_midway(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`midway` returned."""

    def spent(self) -> dict[str, float]:
        """Return the seconds that each phase of the task has taken so far."""

    def add_spent(self, seconds: dict[str, float]) -> None:
        """Count what an earlier process has spent on the task."""

    def note(self, text: str) -> None:
        """Say something to the user, and keep it in the history."""


class Flight:
    """One training that nobody keeps; it starts at its first step."""

    epoch = 0

    def begin(self, epoch: int, augment: torch.Generator, losses: Tensor) -> int:
        """Begin an epoch; return how many of its steps are done already."""
        return 0

    def offer(self, step: int) -> None:
        """Tell that so many steps of the epoch are done: a place where the training can be left."""

    def end(self) -> None:
        """Tell that the training is complete."""


class Inflight:
    """A keeper that keeps nothing; a run brings one that writes."""

    def task(self, learner: Learner, index: int) -> None:
        """Begin a task; what is trained next belongs to it."""

    def enter(self, net: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> Flight:
        """Begin a training, where it was left if it was."""
        return Flight()


NOT_KEPT = Inflight()
