"""Progress-reporting interface for long-running work."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """A reporter that does nothing; the command line has one that draws bars."""

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """Yield ``items``, reporting each one as done."""
        yield from items

    def say(self, message: str) -> None:
        """Show one line to the user."""

    def stage(self, label: str) -> AbstractContextManager[None]:
        """Name the enclosing work (a task, a run) within which bars appear."""
        return nullcontext()


SILENT = Progress()
