"""Signal handling: stop at once, or at the next safe point."""

import signal
import threading

import pytest

from cofima.core import signals
from cofima.core.signals import Interrupted, defer, handle_signals, pending
from cofima.core.system import HANG_UP

pytestmark = pytest.mark.usefixtures("fresh_signals")
EVERY = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, HANG_UP])


@EVERY
def test_a_signal_ends_impatient_work_at_once(number: int) -> None:
    with pytest.raises(Interrupted) as caught, handle_signals():
        signal.raise_signal(number)
    assert caught.value.signal == number
    assert signal.getsignal(number) == signals.DEFAULTS[number]


@EVERY
def test_patient_work_asks_and_the_second_signal_ends_it(number: int) -> None:
    with handle_signals():
        defer(True)
        assert pending() is None
        signal.raise_signal(number)
        assert pending() == number
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
    assert pending() is None, "what was asked of this run is not asked of the next"


def test_others_who_listen_or_ignore_are_left_alone() -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    ignored = signal.signal(HANG_UP, signal.SIG_IGN)  # nohup
    try:
        with handle_signals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(HANG_UP)
            assert heard == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(HANG_UP, ignored)


def test_another_thread_than_the_main_one_may_run_too() -> None:
    done = []

    def work() -> None:
        with handle_signals():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
