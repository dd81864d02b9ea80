"""Downloads of published files: resumable, bounded in size, and verified by a digest."""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPResponse
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from cofima.core.atomic import require_space, write_text
from cofima.core.errors import CofimaError, file_error
from cofima.core.names import shortened
from cofima.core.progress import SILENT, Progress

TIMEOUT = 30.0  # seconds to wait for the next bytes
TRIES = 4  # consecutive attempts without new bytes before giving up
PAUSE = 1.0  # seconds, times the number of such attempts
STEP = 1 << 20  # bytes per step of the progress bar
MOST = 20_000_000_000  # maximum bytes of a file whose server does not report its size
BUSY = (408, 425, 429, 500, 502, 503, 504)  # status codes of temporary failures


@dataclass(frozen=True)
class RemoteFile:
    """Published file.

    Attributes:
        name: File name.
        url: Official address; empty if there is none that a program can download.
        digest: ``md5:`` or ``sha256:`` and hexadecimal digits, if published.
        cited: Source that published the digest.
        size: Number of bytes, if published.
    """

    name: str
    url: str = ""
    digest: str = ""
    cited: str = ""
    size: int | None = None


class _Redirect(HTTPRedirectHandler):
    """Redirect handler that follows redirects to web addresses only."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        require_web_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> OpenerDirector:
    """Return an opener for http and https only; urllib's default also opens files and FTP."""
    opener = OpenerDirector()
    for handler in (ProxyHandler(), HTTPHandler(), HTTPSHandler()):
        opener.add_handler(handler)
    for more in (_Redirect(), HTTPDefaultErrorHandler(), HTTPErrorProcessor()):
        opener.add_handler(more)
    return opener


def require_web_address(url: str) -> None:
    """Raise if an address is not http or https."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise CofimaError(f"{shortened(url)} is no address of http or https; nothing is read from it")


@dataclass(frozen=True)
class _Origin:
    """Identity of the file that a partial download belongs to; JSON-serializable."""

    url: str
    validator: str  # the server's identifier of this exact content: an ETag or a date
    total: int | None

    @classmethod
    def read(cls, path: Path) -> "_Origin | None":
        """Read the record of a partial download; None if it is missing or invalid."""
        try:
            found = cls(**json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return found if isinstance(found.validator, str) and found.validator else None


@dataclass(frozen=True)
class _Partial:
    """Incomplete download: the bytes so far, and a record of their origin."""

    path: Path
    origin_path: Path

    @classmethod
    def of(cls, path: Path) -> "_Partial":
        """Return the partial download of a file to be saved at ``path``."""
        return cls(path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.part.json"))

    def size(self) -> int:
        """Return the number of bytes downloaded so far."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def wanted(self, url: str) -> dict[str, str]:
        """Return the headers that request the remaining bytes; none if the whole file is needed."""
        origin = _Origin.read(self.origin_path)
        if origin is None or origin.url != url or not self.size():
            return {}
        return {"Range": f"bytes={self.size()}-", "If-Range": origin.validator}

    def begin(self, origin: _Origin) -> None:
        """Discard all bytes, and record the new origin."""
        self.path.unlink(missing_ok=True)  # first: the old bytes must never be paired with the new origin
        write_text(self.origin_path, json.dumps(asdict(origin)))

    def append(self, pieces: Iterator[bytes]) -> Iterator[int]:
        """Write bytes as they arrive; yield the total number so far."""
        with self._open() as file:
            while True:
                piece = next(pieces, b"")  # outside of the try: network errors are not disk errors
                if not piece:
                    return
                try:
                    file.write(piece)
                except OSError as error:
                    raise self._no_room(error) from error
                yield file.tell()

    def _open(self) -> IO[bytes]:
        try:
            return self.path.open("ab", buffering=0)
        except OSError as error:
            raise file_error(self.path, error) from error

    def _no_room(self, error: OSError) -> CofimaError:
        have = f"{self.size() / 1e6:,.1f} MB"
        return CofimaError(
            f"{self.path} could not be written ({error.strerror}) after {have}; make room, and the same "
            "command goes on from there"
        )

    def finish(self, path: Path) -> None:
        """Rename the complete file to its final name."""
        self.path.replace(path)
        self.origin_path.unlink(missing_ok=True)


def download(file: RemoteFile, url: str, path: Path, progress: Progress = SILENT) -> None:
    """Download a file to ``path``; resume an earlier partial download.

    The content is not verified: see :func:`verify`.
    """
    require_web_address(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _Partial.of(path)
    most, failed = partial.size(), 0
    while fault := _attempt(file, url, partial, progress):
        # progress means more bytes than ever before: a server may make us start over again and again
        failed = 0 if partial.size() > most else failed + 1
        most = max(most, partial.size())
        if failed == TRIES:
            raise CofimaError(
                f"{url} could not be read to its end ({fault}); the same command goes on after the "
                f"{partial.size() / 1e6:,.1f} MB that are there"
            )
        time.sleep(PAUSE * failed)
    partial.finish(path)


def _attempt(file: RemoteFile, url: str, partial: _Partial, progress: Progress) -> str:
    """Download as much as the connection allows; return why it ended early, or an empty string."""
    headers = {"User-Agent": f"cofima/{version('cofima')}", "Accept-Encoding": "identity"}
    request = Request(url, headers=headers | partial.wanted(url))
    try:
        with _opener().open(request, timeout=TIMEOUT) as answer:
            total = _agree(file, url, partial, answer)
            _receive(file, url, partial, answer, total, progress)
    except HTTPError as error:
        error.close()
        if error.code == 416:  # range not satisfiable: our bytes are not a prefix of this file
            partial.path.unlink(missing_ok=True)
        elif error.code not in BUSY:
            raise CofimaError(f"{url} answers {error.code} {error.reason}: it cannot be had there") from error
        return f"it answers {error.code} {error.reason}"
    except (OSError, HTTPException, ValueError) as error:  # network; disk errors are CofimaErrors by now
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        return str(reason) or type(error).__name__
    if total is not None and partial.size() < total:
        return f"it ends after {partial.size():,} of {total:,} bytes"
    return ""


def _agree(file: RemoteFile, url: str, partial: _Partial, answer: HTTPResponse) -> int | None:
    """Return the size of the whole file; start over if the answer does not continue the partial download."""
    length = answer.headers.get("Content-Length", "")
    total = int(length) if length.isdecimal() else None
    if answer.status == 206:
        span, _, whole = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if span.partition("-")[0] != str(partial.size()) or not whole.isdecimal():
            partial.path.unlink(missing_ok=True)
            raise ValueError("it sends another part than was asked for")
        total = int(whole)
    else:
        validator = answer.headers.get("ETag", "")
        if not validator or validator.startswith("W/"):  # a weak ETag may identify different bytes
            validator = answer.headers.get("Last-Modified", "")
        partial.begin(_Origin(url, validator, total))
    if None not in (file.size, total) and total != file.size:
        partial.path.unlink(missing_ok=True)
        raise CofimaError(
            f"{url} has {total:,} bytes, and {file.name} as published has {file.size:,}: it is another file"
        )
    if total is not None:
        require_space(partial.path, total - partial.size())
    return total


def _receive(
    file: RemoteFile, url: str, partial: _Partial, answer: HTTPResponse, total: int | None, progress: Progress
) -> None:
    """Append the body of a response to a partial download."""
    most = total if total is not None else file.size or MOST
    pieces = iter(lambda: answer.read1(STEP), b"")
    steps = _steps(partial.append(pieces), partial.size(), most, url)
    for _ in progress.track(steps, -(-most // STEP) if total else 0, f"{file.name}, MB"):
        pass


def _steps(sizes: Iterator[int], start: int, most: int, url: str) -> Iterator[int]:
    """Yield once per completed step, including those of earlier attempts."""
    done = 0
    for size in chain([start], sizes):
        if size > most:
            raise CofimaError(f"{url} sends more than {most:,} bytes; it was not read on")
        yield from range(done, size // STEP)
        done = size // STEP


def verify(file: RemoteFile, path: Path) -> str:
    """Compare a file with its published size and digest; return a description of the result.

    Raises:
        CofimaError: The file differs from the published one.
    """
    if file.size is not None and path.stat().st_size != file.size:
        raise CofimaError(
            f"{path} has {path.stat().st_size:,} bytes, and as published ({file.cited}) it has {file.size:,}"
        )
    kind, _, wanted = file.digest.partition(":")
    if not wanted:
        return "unverified: no digest of it is published"
    with path.open("rb") as content:
        new = hashlib.new(kind, usedforsecurity=False)
        found = hashlib.file_digest(content, lambda: new).hexdigest()
    if found != wanted:
        raise CofimaError(
            f"{path} is not the published file: its {kind} is {found}, and {file.cited} says {wanted}"
        )
    return f"{kind} {found}, as in {file.cited}"
