"""Platform differences: the Unix code path, and the other one with Unix-only modules hidden."""

import errno
import os
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from cofima.core import system

SCRIPT = Path(__file__).with_name("learn_without_unix.py")


@pytest.mark.skipif(not system.UNIX, reason="it is what all other tests do there")
def test_what_is_learned_without_unix_is_what_is_learned_with_it(tmp_path: Path) -> None:
    """Learn, extend, undo and locks: every file, hash and refusal is the same."""
    from forked import Forked

    started = []
    for name in ("unix", "windows"):
        (tmp_path / name).mkdir()
        started.append(Forked(SCRIPT, tmp_path / name, name, cwd=tmp_path))
    unix, windows = (process.communicate() for process in started)
    assert [process.returncode for process in started] == [0, 0], (unix, windows)
    assert windows[0] == unix[0]
    assert [line.split()[0] for line in unix[0].splitlines()][:5] == [
        "learn",
        "extend",
        "undo",
        "load",
        "run",
    ]
    assert "lock True True" in unix[0]


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the module anew on a system that has not what the module asks for."""
    monkeypatch.setitem(sys.modules, "resource", None)
    for name in ("pwrite", "getuid", "posix_fallocate", "O_NOFOLLOW", "O_NONBLOCK"):
        monkeypatch.delattr(os, name, raising=False)
    spec = spec_from_file_location("system_elsewhere", system.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    assert not made.UNIX
    return made


def test_without_pwrite_the_same_bytes_are_written_by_many_threads(
    windows: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    with path.open("w+b", buffering=0) as file:
        windows.allocate(file.fileno(), 4000)
        parts = [
            threading.Thread(
                target=windows.write_at, args=(file.fileno(), memoryview(bytes([n]) * 100), n * 100)
            )
            for n in range(40)
        ]
        for part in parts:
            part.start()
        for part in parts:
            part.join()
    assert path.read_bytes() == b"".join(bytes([n]) * 100 for n in range(40))


def test_memory_is_told_or_nothing_is_claimed(windows: ModuleType) -> None:
    assert windows.peak_memory() == 0.0  # these counters are Windows' own
    assert system.peak_memory() > 10e6


@pytest.mark.parametrize("target", ["file", "missing"])
def test_without_o_nofollow_a_link_is_refused(target: str, windows: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match="symbolic") as told:
        windows.open_unlinked(tmp_path / "link", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert told.value.errno == errno.ELOOP
    assert not (tmp_path / "missing").exists()
    assert (tmp_path / "file").read_text() == "mine"
    os.close(windows.open_unlinked(tmp_path / "new", os.O_WRONLY | os.O_CREAT))


def test_a_link_that_comes_in_between_is_refused_too(
    windows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    whole, opened = os.open, []

    def open_later(path: Path, *how: int) -> int:
        path.symlink_to(tmp_path / "file")
        opened.append(whole(path, *how))
        return opened[0]

    monkeypatch.setattr(os, "open", open_later)
    with pytest.raises(OSError, match="symbolic"):
        windows.open_unlinked(tmp_path / "link", os.O_RDWR)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(opened[0])


def test_folders_are_not_flushed_and_files_are_opened_for_writing(
    windows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    flushed, whole = [], os.open

    def opened(path: Path, how: int) -> int:
        flushed.append((path.name, how))
        return whole(path, how)

    monkeypatch.setattr(os, "open", opened)
    windows.sync(tmp_path)
    windows.sync(tmp_path / "file")
    assert flushed == [("file", os.O_RDWR)]


def test_what_another_program_has_open_is_replaced_when_it_lets_go(
    windows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    whole, refusals = Path.replace, [1, 2, 3]

    def replaced(self: Path, target: Path) -> Path:
        if refusals:
            refusals.pop()
            raise PermissionError(errno.EACCES, "in use")
        return whole(self, target)

    monkeypatch.setattr(Path, "replace", replaced)
    windows.replace(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    refusals.extend([1] * 10_000)
    monkeypatch.setattr(windows, "_PATIENCE", 0.05)
    (tmp_path / "new").write_text("newer")
    with pytest.raises(PermissionError):
        windows.replace(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"


def test_a_lock_is_closed_before_it_is_unlinked(windows: ModuleType, tmp_path: Path) -> None:
    class Held(type(tmp_path)):  # type: ignore[misc]
        def unlink(self, missing_ok: bool = False) -> None:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(handle)
            super().unlink(missing_ok)

    path = Held(tmp_path / ".lock")
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    assert windows.has_name(path, handle)
    windows.unlink_and_close(path, handle)
    assert not path.exists()


def test_no_process_is_asked_by_a_signal(windows: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows' os.kill ends the process, whatever the signal."""
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("killed"))
    assert windows.is_running(os.getpid())
    monkeypatch.undo()
    assert system.is_running(os.getpid())
    assert not system.is_running(2**31 - 1)


def test_a_file_is_as_large_as_it_says_where_blocks_are_not_told(tmp_path: Path) -> None:
    class Told:
        def stat(self) -> object:
            return type("Stat", (), {"st_size": 5000})()

    assert system.size_on_disk(Told()) == 5000  # type: ignore[arg-type]
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10_000_000)
    assert system.size_on_disk(tmp_path / "sparse") < 10_000_000
