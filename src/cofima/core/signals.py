"""What Ctrl-C, SIGTERM and a closed terminal do to a run: it first writes down how far it is.

A signal ends the work at once, as ever, unless the work is :func:`patient`: then it asks itself, at
places where it can stop, and the second signal ends it at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


class Interrupted(KeyboardInterrupt):
    """The user, or the system, ended a run.

    Attributes:
        signal: Which signal it was; the process ends with 128 and this number.
        kept: What is kept, and how to go on; empty where it is not known.
    """

    def __init__(self, number: int, kept: str = "") -> None:
        super().__init__(number, kept)  # as they are given: it may come from another process
        self.signal, self.kept = number, kept

    def __str__(self) -> str:
        return self.kept


class _Now:
    """What signals have asked for; they belong to the process, and so does this."""

    asked: int | None = None
    patient: bool = False


def asked() -> int | None:
    """Return the signal that asks the work to stop, or None."""
    return _Now.asked


@contextmanager
def listening() -> Iterator[None]:
    """Turn the signals that end a run into :class:`Interrupted`, within.

    Only in the main thread, where alone Python lets one listen, and only to signals that nobody else
    listens to or ignores already.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: own for number, own in SIGNALS.items() if signal.getsignal(number) == own}
    for number in before:
        signal.signal(number, _heard)
    try:
        yield
    finally:
        _Now.asked, _Now.patient = None, False
        for number, own in before.items():
            signal.signal(number, own)


def patient(wait: bool) -> None:
    """Let the first signal wait until the work asks for it, or no longer."""
    _Now.patient = wait


def _heard(number: int, _: FrameType | None) -> None:
    if not _Now.patient or _Now.asked is not None:
        raise Interrupted(number)
    _Now.asked = number
