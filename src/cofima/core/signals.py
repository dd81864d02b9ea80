"""Signal handling: on Ctrl-C, SIGTERM or a closed terminal, a run writes a checkpoint and stops.

A signal interrupts immediately unless the running code called :func:`defer`. In that case the code polls
:func:`pending` at points where it can stop, and only a second signal interrupts immediately.
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
    """Exception for a run ended by a signal.

    Attributes:
        signal: Number of the signal; the exit code of the process is 128 plus this number.
        kept: Message on what is saved and how to continue; empty if not known.
    """

    def __init__(self, number: int, kept: str = "") -> None:
        super().__init__(number, kept)  # all arguments, so that it can be pickled between processes
        self.signal, self.kept = number, kept

    def __str__(self) -> str:
        return self.kept


class _State:
    """Pending signal and mode; global to the process, as signals are."""

    pending: int | None = None
    deferred: bool = False


def pending() -> int | None:
    """Return the deferred signal that asks the run to stop, or None."""
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
    """Turn deferral of the first signal on or off; a deferred signal is returned by :func:`pending`."""
    _State.deferred = deferred


def _handler(number: int, _: FrameType | None) -> None:
    if not _State.deferred or _State.pending is not None:
        raise Interrupted(number)
    _State.pending = number
