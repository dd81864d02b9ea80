"""Progress-reporting interface for long-running work."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")
STEP = 3.0  # cost of an image in a training step, in forward passes


class Progress:
    """Reporter that does nothing; the command line replaces it with progress bars."""

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """Yield ``items``, reporting each one as done."""
        yield from items

    def expect(self, work: float) -> None:
        """Announce upcoming work, in forward passes of images through a network."""

    def worked(self, work: float) -> None:
        """Report a part of the announced work as done."""

    def say(self, message: str) -> None:
        """Show one line to the user."""

    def stage(self, label: str) -> AbstractContextManager[None]:
        """Label the enclosing work (a task, a run) of the bars within the context."""
        return nullcontext()


SILENT = Progress()
