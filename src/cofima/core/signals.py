"""Signal handling: Ctrl-C, SIGTERM and a closed terminal end a run after it has written a checkpoint.

A signal ends the work at once unless the work called :func:`defer`. Then it checks :func:`pending` itself,
at places where it can stop, and only a second signal ends it at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cofima.core.system import HANG_UP

DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    HANG_UP: signal.SIG_DFL,
}


class Interrupted(KeyboardInterrupt):
    """The user, or the system, ended a run.

    Attributes:
        signal: Which signal it was; the process ends with 128 and this number.
        kept: A message on what is saved and how to continue; empty where it is not known.
    """

    def __init__(self, number: int, kept: str = "") -> None:
        super().__init__(number, kept)  # as they are given: it may come from another process
        self.signal, self.kept = number, kept

    def __str__(self) -> str:
        return self.kept


class _State:
    """The pending signal and the mode; signals belong to the process, and so does this."""

    pending: int | None = None
    deferred: bool = False


def pending() -> int | None:
    """Return the signal that asks the work to stop, or None."""
    return _State.pending


@contextmanager
def handle_signals() -> Iterator[None]:
    """Turn the signals that end a run into :class:`Interrupted` within the context.

    Only in the main thread, the only one where Python allows handlers, and only for signals that still have
    their default handler.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {n: default for n, default in DEFAULTS.items() if signal.getsignal(n) == default}
    for number in before:
        signal.signal(number, _handler)
    try:
        yield
    finally:
        _State.pending, _State.deferred = None, False
        for number, default in before.items():
            signal.signal(number, default)


def defer(deferred: bool) -> None:
    """Let the first signal wait until the work asks for it with :func:`pending`, or no longer."""
    _State.deferred = deferred


def _handler(number: int, _: FrameType | None) -> None:
    if not _State.deferred or _State.pending is not None:
        raise Interrupted(number)
    _State.pending = number
