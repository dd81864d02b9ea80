"""How long work tells how far it is, without knowing who listens."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """A listener that hears nothing; the command line brings one that draws a bar."""

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """Yield ``items``, announcing each one as done."""
        yield from items

    def say(self, message: str) -> None:
        """Tell the user one line."""

    def stage(self, label: str) -> AbstractContextManager[None]:
        """Name the wider work (a task, a run) within which bars appear."""
        return nullcontext()


SILENT = Progress()
