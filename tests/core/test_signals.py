"""What a signal does: end the work at once, or wait until the work can be left."""

import signal
import threading

import pytest

from cofima.core import signals
from cofima.core.signals import Interrupted, asked, listening, patient

pytestmark = pytest.mark.usefixtures("fresh_signals")
EVERY = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


@EVERY
def test_a_signal_ends_impatient_work_at_once(number: int) -> None:
    with pytest.raises(Interrupted) as caught, listening():
        signal.raise_signal(number)
    assert caught.value.signal == number
    assert signal.getsignal(number) == signals.SIGNALS[number]


@EVERY
def test_patient_work_asks_and_the_second_signal_ends_it(number: int) -> None:
    with listening():
        patient(True)
        assert asked() is None
        signal.raise_signal(number)
        assert asked() == number
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
    assert asked() is None, "what was asked of this run is not asked of the next"


def test_others_who_listen_or_ignore_are_left_alone() -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with listening():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            assert heard == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, ignored)


def test_another_thread_than_the_main_one_may_run_too() -> None:
    done = []

    def work() -> None:
        with listening():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
