"""The hub is probed for a few seconds at most before it is used."""

import socket
import threading

import pytest
from huggingface_hub import constants

from cofima.core import hub
from cofima.core.hub import quick_hub, reachable


def test_a_server_is_reachable_and_a_closed_port_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert reachable(address)
    assert not reachable(address)


def test_a_proxy_is_what_must_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert reachable("https://no.such.host.invalid")


def test_a_lookup_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()

    def hang(*_: object) -> None:
        given_up.wait()
        raise OSError

    monkeypatch.setattr(socket, "create_connection", hang)
    assert not reachable("https://huggingface.co", seconds=0.05)
    given_up.set()


@pytest.mark.parametrize("there", [True, False])
def test_without_the_hub_only_the_cache_is_asked(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "reachable", lambda _: there)
    with quick_hub():
        assert constants.HF_HUB_OFFLINE is not there
    assert constants.HF_HUB_OFFLINE is False
