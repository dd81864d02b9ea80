"""How far the training of a task is, written down now and then: a run that is killed goes on from there."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cofima import interruption
from cofima.errors import CofimaError
from cofima.training import sealed
from cofima.training.inflight import Flight, Inflight, Learner
from cofima.training.position import Position

FORMAT = 1
EVERY = 60.0  # seconds between two writings, at least; COFIMA_INFLIGHT says otherwise
SHARE = 0.02  # of the time may go into writing, at most
SLOW = 100e6  # bytes a second: what a disk is taken to write before it was measured


def wanted() -> float | None:
    """Return the seconds between two writings that the environment asks for, or None for no writing."""
    text = os.environ.get("COFIMA_INFLIGHT", "")
    try:
        return None if text == "off" else float(text or EVERY)
    except ValueError:
        raise CofimaError(f"COFIMA_INFLIGHT = {text}: expected seconds, or off") from None


class Keeper(Inflight):
    """Write where the first training of a task is; find it again.

    A writing costs time in proportion to the network, so it waits until it is a small share of all the
    time that has passed, and until there is enough to lose. A method that trains twice in a task repeats
    the second training: what the first came to is still there.

    Args:
        folder: Where it is written.
        said: What is written with it; ``with`` names what the last bits of a result depend on.
        after: Returns which state the task in progress goes out from.
        every: Seconds between two writings, at least.
    """

    def __init__(
        self, folder: Path, said: dict[str, Any], after: Callable[[], str], every: float | None = None
    ) -> None:
        self.folder, self.said, self.after = folder, said, after
        self.every = EVERY if every is None else every
        self.began = time.monotonic()
        self.cost, self.rate = 0.0, 1 / SLOW

    def task(self, learner: Learner, index: int) -> None:
        """Begin a task."""
        self.learner, self.index, self.trainings, self.silent = learner, index, 0, False
        self.start, self.last = self.after(), time.monotonic()
        learner.add_spent({"inflight": 0.0})

    def enter(self, net: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> Flight:
        """Begin a training, where it was left if it was; only the first of a task is kept."""
        self.trainings += 1
        if self.trainings > 1:
            return Flight()
        flight = Kept(self, Position(net, optimizer, schedule))
        weights = sum(value.numel() * value.element_size() for value in net.state_dict().values())
        self._plan(2 * weights)
        return flight

    def find(self, where: Position) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return what was written of this task, if it is whole and fits; else clear it away and say why."""
        try:
            said = sealed.read_said(self.folder)
            if said is None:
                return None
            if said.get("format") != FORMAT:
                raise ValueError("another version of cofima wrote it")
            if said["task"] != self.index or said["after"] != self.start:
                sealed.remove(self.folder)  # it has been learned since, or undone
                return None
            tensors = sealed.read_tensors(self.folder, said)
            if misfit := where.misfit(tensors):
                raise ValueError(misfit)
        except ValueError as error:
            self.learner.note(f"the state in the middle of this task was not taken up: {error}")
            sealed.remove(self.folder)
            return None
        now = self.said["with"]
        if other := [
            f"{key} {said['with'].get(key)}, now {now[key]}"
            for key in now
            if said["with"].get(key) != now[key]
        ]:
            self.learner.note(f"this task was begun with {'; '.join(other)}: the last bits may differ")
        return said, tensors

    def due(self) -> bool:
        """Tell whether it is time to write."""
        return time.monotonic() >= self.next

    def write(self, where: Position, place: dict[str, Any]) -> None:
        """Write where the training is. Where that fails the training goes on, and it is said."""
        start = time.monotonic()
        tensors = where.tensors(complete=place["complete"])
        tensors |= {f"method.{key}": value for key, value in self.learner.midway().items()}
        said = {"format": FORMAT, "task": self.index, "after": self.start, "seconds": self.learner.spent()}
        try:
            sealed.write(self.folder, tensors, self.said | said | where.said() | place)
        except (OSError, SafetensorError, CofimaError) as error:
            if not self.silent:
                self.learner.note(
                    f"the state in the middle of this task could not be written ({error}); "
                    "the training goes on, and would be repeated after a crash"
                )
            self.silent = True  # said once
        self.last = time.monotonic()
        size = sum(value.numel() * value.element_size() for value in tensors.values())
        self.cost, self.rate = self.cost + self.last - start, (self.last - start) / size
        self.learner.add_spent({"inflight": self.last - start})
        self._plan(size)

    def _plan(self, size: int) -> None:
        """Say when to write next: not too soon after the last time, and within the share of time."""
        self.next = max(self.last + self.every, self.began + (self.cost + size * self.rate) / SHARE)


class Kept(Flight):
    """A training whose steps are written down."""

    def __init__(self, keeper: Keeper, where: Position) -> None:
        self.keeper, self.where = keeper, where
        self.epoch, self.step, self.complete = 0, 0, False
        self.found: dict[str, Tensor] = {}
        kept = keeper.find(where)
        if kept is not None:
            said, self.found = kept
            self.epoch, self.step, self.complete = said["epoch"], said["step"], said["complete"]
            where.load(self.found, said)
            own = {k.removeprefix("method."): v for k, v in self.found.items() if k.startswith("method.")}
            keeper.learner.restore_midway(own)
            keeper.learner.add_spent(said["seconds"])
        interruption.patient(True)

    def begin(self, epoch: int, augment: torch.Generator, losses: Tensor) -> int:
        """Begin an epoch, or go on in the one where the training was left."""
        self.where.augment, self.where.losses = augment, losses
        if self.found:
            self.where.begin(self.found)
            self.found = {}
        else:
            self.epoch, self.step = epoch, 0
        return self.step

    def offer(self, step: int) -> None:
        """Write if it is time, or if somebody wants to leave."""
        self.step = step
        if self.keeper.due() or interruption.asked() is not None:
            self._write()
            self._leave()

    def end(self) -> None:
        """Write what the training came to, if it is time: what follows may take long as well."""
        self.found = {}
        if not self.complete and (self.keeper.due() or interruption.asked() is not None):
            self.epoch, self.step, self.complete = self.epoch + 1, 0, True
            self._write()
        self._leave()
        interruption.patient(False)

    def _write(self) -> None:
        place = {"epoch": self.epoch, "step": self.step, "complete": self.complete}
        self.keeper.write(self.where, place)

    def _leave(self) -> None:
        if (asked := interruption.asked()) is not None:
            raise interruption.Interrupted(asked)
