"""Progress-reporting interface for long-running work."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")
STEP = 3.0  # one image's part in a training step, in forward passes


class Progress:
    """A reporter that does nothing; the command line has one that draws bars."""

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """Yield ``items``, reporting each one as done."""
        yield from items

    def expect(self, work: float) -> None:
        """Announce work to come, counted in images that pass forward through a network."""

    def worked(self, work: float) -> None:
        """Report a part of the announced work as done."""

    def say(self, message: str) -> None:
        """Show one line to the user."""

    def stage(self, label: str) -> AbstractContextManager[None]:
        """Name the enclosing work (a task, a run) within which bars appear."""
        return nullcontext()


SILENT = Progress()
