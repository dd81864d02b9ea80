"""Middleware that rejects requests from other sites, and uploads that exceed the available space.

A browser sends requests on behalf of any site, also to 127.0.0.1, and a site can point its own name there
(DNS rebinding). But it always states the requested name (Host) and the requesting site (Origin).
"""

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Refusal = tuple[int, str]

ANYWHERE = ("0.0.0.0", "::", "")  # addresses that mean: listen on all interfaces
LOCAL = ("localhost", "127.0.0.1", "::1")
MOST_BYTES = 1_000_000  # maximum size of a request that is not an upload


class Guard:
    """ASGI middleware that forwards only legitimate requests to the page.

    Args:
        app: The page.
        host: The address that it listens on.
        names: Other host names under which it is reached, such as behind a proxy.
        uploads: The folder of uploaded files.
        most: Maximum total size of all uploads in bytes.
    """

    def __init__(self, app: App, *, host: str, names: Collection[str], uploads: Path, most: int) -> None:
        self.app, self.host, self.uploads, self.most = app, host.lower(), uploads, most
        self.names = {name.lower() for name in names}
        self.arriving = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forward a request, or respond with the reason for its rejection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin1").lower(): value.decode("latin1") for key, value in scope["headers"]}
        refusal = self._stranger(headers) or self._too_much(scope, headers)
        if refusal is None:
            with self._counted(scope, headers):
                await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            status, text = refusal
            kind = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": status, "headers": kind})
            await send({"type": "http.response.body", "body": text.encode()})

    def _stranger(self, headers: dict[str, str]) -> Refusal | None:
        asked, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own(_name(f"//{asked}")):
            return 403, "this page is not served under that name; start cofima app with --name NAME"
        same = origin is None or origin.partition("://")[2] == asked
        if not same and _name(origin or "") not in self.names:
            return 403, "another site may not use this page"
        return None

    def _is_own(self, name: str) -> bool:
        if name in (*LOCAL, self.host, *self.names) and name:
            return True
        # DNS rebinding needs a name: a bare IP address cannot be pointed elsewhere
        return self.host in ANYWHERE and (_is_address(name) or name == socket.gethostname().lower())

    def _too_much(self, scope: Message, headers: dict[str, str]) -> Refusal | None:
        if scope.get("method") not in ("POST", "PUT", "PATCH"):
            return None
        length = headers.get("content-length", "")
        if not length.isdecimal():
            return 411, "the length of a request must be given"
        if not _uploads(scope):
            return (413, "the request is too long") if int(length) > MOST_BYTES else None
        if self._taken() + self.arriving + int(length) > self.most:
            room = f"{self.most / 1e6:,.0f} MB"
            return (
                413,
                f"there is no room: all uploads together may take {room}, and each is kept for an hour",
            )
        return None

    @contextmanager
    def _counted(self, scope: Message, headers: dict[str, str]) -> Iterator[None]:
        """Count an upload while it arrives; afterwards it counts as part of the folder."""
        size = int(headers.get("content-length") or 0) if _uploads(scope) else 0
        self.arriving += size
        try:
            yield
        finally:
            self.arriving -= size

    def _taken(self) -> int:
        total = 0
        for file in self.uploads.rglob("*"):
            with suppress(FileNotFoundError):  # gradio removes uploads after an hour
                total += file.lstat().st_size if file.is_file() else 0
        return total


def _uploads(scope: Message) -> bool:
    return scope.get("method") == "POST" and str(scope.get("path", "")).rstrip("/").endswith("/upload")


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # unbalanced brackets
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
