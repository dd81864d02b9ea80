"""Access to the Hugging Face hub that fails fast without a network."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

SECONDS = 3.0  # to reach the hub; its own client retries for minutes, and prints each attempt


@contextmanager
def quick_hub() -> Iterator[None]:
    """Use offline mode within the context if the hub cannot be reached: cached files, or an error."""
    from huggingface_hub import constants

    places: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [place.HF_HUB_OFFLINE for place in places]
    offline = constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT)
    try:
        for place in places:
            place.HF_HUB_OFFLINE = offline
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def reachable(address: str, seconds: float = SECONDS) -> bool:
    """Return True if a server, or its proxy, accepts a connection within some seconds."""
    url = urlsplit(address)
    proxy = urlsplit(getproxies().get(url.scheme, ""))
    host, port = (proxy.hostname, proxy.port) if proxy.hostname else (url.hostname, url.port)
    found = Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port or (80 if url.scheme == "http" else 443)), seconds).close()
            found.set()
        except OSError:
            pass

    # in a thread, since DNS lookups have no timeout of their own
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return found.is_set()
