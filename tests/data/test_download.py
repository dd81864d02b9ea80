"""Downloads give the published file or a one-sentence error; interrupted ones resume."""

import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.data import download as module
from cofima.data.download import RemoteFile, download, verify
from web import Web, serving

CONTENT = bytes(range(256)) * 9000  # 2.2 MB


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.0)


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as server:
        server.files["/a.bin"] = CONTENT
        yield server


def get(web: Web, path: Path, **known: Any) -> None:
    download(RemoteFile("a.bin", **known), f"{web.address}/a.bin", path)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_arrives_and_nothing_is_left_beside_it(web: Web, tmp_path: Path) -> None:
    get(web, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert names(tmp_path) == {"a.bin"}
    assert web.asked == [("/a.bin", "")]


def test_a_broken_connection_is_continued_at_its_byte(web: Web, tmp_path: Path) -> None:
    web.break_after = [1_000_001, 70_000]
    get(web, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert [span for _, span in web.asked] == ["", "bytes=1000001-", "bytes=1070001-"]


def test_another_call_goes_on_where_the_first_gave_up(web: Web, tmp_path: Path) -> None:
    web.break_after = [500_000] + [0] * module.TRIES
    with pytest.raises(CofimaError, match=r"ends after 500,000 of 2,304,000 bytes.*goes on after the 0.5 MB"):
        get(web, tmp_path / "a.bin")
    assert names(tmp_path) == {"a.bin.part", "a.bin.part.json"}
    web.asked.clear()
    get(web, tmp_path / "a.bin")
    assert web.asked == [("/a.bin", "bytes=500000-")]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_file_that_changed_meanwhile_is_not_joined_with_the_old_one(web: Web, tmp_path: Path) -> None:
    web.break_after = [500_000] + [0] * module.TRIES
    with pytest.raises(CofimaError):
        get(web, tmp_path / "a.bin")
    web.files["/a.bin"], web.etag = CONTENT[::-1], '"two"'
    get(web, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("etag", ["", 'W/"weak"'])
def test_without_a_name_of_the_content_all_of_it_is_read_again(etag: str, web: Web, tmp_path: Path) -> None:
    web.etag, web.break_after = etag, [500_000]
    get(web, tmp_path / "a.bin")
    assert [span for _, span in web.asked] == ["", ""]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_server_that_sends_no_parts_is_read_again(web: Web, tmp_path: Path) -> None:
    web.ranges, web.break_after = False, [500_000]
    get(web, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_damaged_note_of_what_was_begun_means_beginning_again(web: Web, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(b"x" * 10)
    for note in ("", "[]", json.dumps({"url": 1, "validator": None, "total": "x"})):
        (tmp_path / "a.bin.part.json").write_text(note)
        get(web, tmp_path / "a.bin")
        assert (tmp_path / "a.bin").read_bytes() == CONTENT
        (tmp_path / "a.bin.part").write_bytes(b"x" * 10)


def test_a_length_that_is_too_long_is_an_error_and_not_a_loop(web: Web, tmp_path: Path) -> None:
    web.length = 100
    with pytest.raises(CofimaError, match="could not be read to its end"):
        get(web, tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()


def test_a_length_that_is_too_short_gives_a_file_that_is_refused(web: Web, tmp_path: Path) -> None:
    web.length = -1000
    get(web, tmp_path / "a.bin")
    digest = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    with pytest.raises(CofimaError, match=r"not the published file: its sha256 is .*, and the page says"):
        verify(RemoteFile("a.bin", digest=digest, cited="the page"), tmp_path / "a.bin")


def test_another_size_than_the_published_one_is_refused_before_a_byte_is_read(
    web: Web, tmp_path: Path
) -> None:
    with pytest.raises(CofimaError, match=r"has 2,304,000 bytes, and a.bin as published has 7"):
        get(web, tmp_path / "a.bin", size=7)
    assert not (tmp_path / "a.bin.part").exists()


def test_a_body_of_unknown_length_ends_where_it_ends_and_is_bounded(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.chunked = True
    get(web, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    monkeypatch.setattr(module, "MOST", 1_000_000)
    with pytest.raises(CofimaError, match="sends more than 1,000,000 bytes"):
        get(web, tmp_path / "b.bin")


def test_a_busy_server_is_asked_again_and_a_missing_file_is_not(web: Web, tmp_path: Path) -> None:
    web.status = [503, 429]
    get(web, tmp_path / "a.bin")
    web.asked.clear()
    with pytest.raises(CofimaError, match=r"/b.bin answers 404 Not Found: it cannot be had there"):
        download(RemoteFile("b.bin"), f"{web.address}/b.bin", tmp_path / "b.bin")
    assert len(web.asked) == 1


@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://127.0.0.1/a.bin", "data:text/plain,a", "//:0/a"])
def test_a_redirection_leads_to_the_web_only(to: str, web: Web, tmp_path: Path) -> None:
    web.redirect = to
    with pytest.raises(CofimaError, match=r"not allowed|no address of http"):
        get(web, tmp_path / "a.bin")
    assert names(tmp_path) == set()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/a", "/etc/passwd", "http://"])
def test_only_web_addresses_are_read(url: str, tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match="no address of http or https"):
        download(RemoteFile("a"), url, tmp_path / "a")


def test_nobody_there_is_one_sentence(tmp_path: Path) -> None:
    with serving() as web:
        address = web.address
    with pytest.raises(CofimaError, match=r"could not be read to its end \(.*refused"):
        download(RemoteFile("a"), f"{address}/a", tmp_path / "a")


def test_a_full_disk_keeps_what_there_is(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """A file on a disk with room for two pieces."""

        def __init__(self, path: Path) -> None:
            self.file, self.left = path.open("ab", buffering=0), 2

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, piece: bytes) -> int:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(piece)

        def tell(self) -> int:
            return self.file.tell()

    with monkeypatch.context() as patch:
        patch.setattr(module._Partial, "_open", lambda self: Full(self.path))
        with pytest.raises(CofimaError, match=r"No space left on device\) after .* MB; make room"):
            get(web, tmp_path / "a.bin")
    have = (tmp_path / "a.bin.part").stat().st_size
    assert have
    web.asked.clear()
    get(web, tmp_path / "a.bin")
    assert web.asked == [("/a.bin", f"bytes={have}-")]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_too_little_room_is_said_before_a_byte_is_read(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(CofimaError, match="needs 2 MB"):
        get(web, tmp_path / "a.bin")
    assert not (tmp_path / "a.bin.part").exists()


def test_progress_counts_megabytes_and_what_was_there_before(web: Web, tmp_path: Path) -> None:
    class Bar(Progress):
        """Keep what is shown."""

        def track(self, items: Any, total: int, label: str) -> Any:
            seen.append((label, total, len(list(items))))
            return []

    seen: list[tuple[str, int, int]] = []
    web.break_after = [1_500_000]
    download(RemoteFile("a.bin"), f"{web.address}/a.bin", tmp_path / "a.bin", Bar())
    assert seen == [("a.bin, MB", 3, 1), ("a.bin, MB", 3, 2)]


def test_a_digest_is_compared_and_its_source_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    file = RemoteFile("a", digest=f"md5:{hashlib.md5(b'abc').hexdigest()}", cited="the page", size=3)
    assert verify(file, path) == "md5 900150983cd24fb0d6963f7d28e17f72, as in the page"
    assert verify(RemoteFile("a"), path) == "unverified: no digest of it is published"
    path.write_bytes(b"abcd")
    with pytest.raises(CofimaError, match=r"has 4 bytes, and as published \(the page\) it has 3"):
        verify(file, path)
