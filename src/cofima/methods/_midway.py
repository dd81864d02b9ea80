"""What a method tells of a task that is being learnt: how long it took so far, and what steps changed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor


class Midway:
    """A method between two steps of a task."""

    state_in_steps: ClassVar[bool] = False
    """Whether the steps of a task change :meth:`state` already, and not only its end."""

    facts: dict[str, Any]
    running: dict[str, Callable[[], float]]

    def state(self) -> dict[str, Tensor]:
        """Return what the next task needs beside the backbone and the head that predicts."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` returned, when backbone and predicting head are in place."""

    def task_state(self) -> dict[str, Tensor]:
        """Return what the steps of a task change beside the network, if a run is cut off between two.

        What :meth:`begin` makes of the state before the task and of the seed is made again; here is only
        what has changed since. Random streams that the method holds are found without being named.
        """
        streams = {f"stream.{name}": chance.get_state() for name, chance in self._streams().items()}
        return streams | (self.state() if self.state_in_steps else {})

    def restore_task_state(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`task_state` returned, after :meth:`begin`."""
        for name, chance in self._streams().items():
            if f"stream.{name}" in state:
                chance.set_state(state[f"stream.{name}"])
        if self.state_in_steps:
            self.restore({key: value for key, value in state.items() if not key.startswith("stream.")})

    def _streams(self) -> dict[str, torch.Generator]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Generator)}

    @contextmanager
    def timed(self, phase: str, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
        """Add the seconds spent within to the task's history."""
        start = clock()
        self.running[phase] = lambda: clock() - start
        try:
            yield
        finally:
            self.add_spent({phase: self.running.pop(phase)()})

    def spent(self) -> dict[str, float]:
        """Return the seconds of each phase so far, also of those that are not over."""
        seconds: dict[str, float] = self.facts["seconds"]
        return seconds | {phase: seconds.get(phase, 0.0) + now() for phase, now in self.running.items()}

    def add_spent(self, seconds: dict[str, float]) -> None:
        """Count seconds of phases, in the task's history."""
        mine = self.facts["seconds"]
        mine |= {phase: mine.get(phase, 0.0) + value for phase, value in seconds.items()}
