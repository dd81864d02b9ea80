"""A small web server that keeps to HTTP, or does not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Web:
    """A server of files, with faults that each last for a number of answers.

    Attributes:
        files: Contents, by path.
        break_after: Bytes after which each of the next answers ends; one entry an answer.
        length: Added to what Content-Length says.
        redirect: Where every request is sent, if anywhere.
        status: Answer with these first; one entry an answer.
        ranges: Parts of files are sent, if asked for.
        etag: The name of the content.
        chunked: No length is said.
    """

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    break_after: list[int] = field(default_factory=list)
    length: int = 0
    redirect: str = ""
    status: list[int] = field(default_factory=list)
    ranges: bool = True
    etag: str = '"one"'
    chunked: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        span = to.headers.get("Range", "")
        self.asked.append((to.path, span))
        content = self.files.get(to.path)
        if self.status:
            return to.send_error(self.status.pop(0))
        if self.redirect:
            to.send_response(302)
            to.send_header("Location", self.redirect)
            return to.end_headers()
        if content is None:
            return to.send_error(404)
        start = 0
        if span and self.ranges and to.headers.get("If-Range") == self.etag:
            start = int(span.removeprefix("bytes=").partition("-")[0])
            if start >= len(content):
                return to.send_error(416)
            to.send_response(206)
            to.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content) + self.length}")
        else:
            to.send_response(200)
        body = content[start:]
        if not self.chunked:
            to.send_header("Content-Length", str(len(body) + self.length))
        if self.etag:
            to.send_header("ETag", self.etag)
        to.end_headers()
        to.wfile.write(body[: self.break_after.pop(0)] if self.break_after else body)
        return None


@contextmanager
def serving() -> Iterator[Web]:
    """Yield a server on this machine."""
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.answer(self)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        web.address = f"http://127.0.0.1:{server.server_port}"
        try:
            yield web
        finally:
            server.shutdown()
