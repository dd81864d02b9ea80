"""What differs between systems: the Unix way, and the other one with the Unix modules hidden."""

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from cofima.core import system

HIDDEN = ("fcntl", "resource")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the module anew on a system that has no Unix modules and no pwrite."""
    for name in HIDDEN:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(os, "pwrite")
    fake = ModuleType("msvcrt")
    fake.LK_NBLCK = 2  # type: ignore[attr-defined]
    fake.held = set()  # type: ignore[attr-defined]

    def locking(handle: int, mode: int, size: int) -> None:
        file = os.fstat(handle).st_ino
        if file in fake.held:  # type: ignore[attr-defined]
            raise PermissionError(13, "Permission denied")
        fake.held.add(file)  # type: ignore[attr-defined]

    fake.locking = locking  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    spec = importlib.util.spec_from_file_location("system_elsewhere", system.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setattr(made, "PAUSE", 0.001)
    return made


def test_without_pwrite_the_same_bytes_are_written_by_many_threads(
    windows: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4000))
    with path.open("r+b", buffering=0) as file:
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


def test_without_flock_a_second_one_waits_and_says_so(windows: ModuleType, tmp_path: Path) -> None:
    held, said = sys.modules["msvcrt"].held, []  # type: ignore[attr-defined]

    def waiting() -> None:
        said.append("waiting")
        held.clear()  # the first one closes its file

    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as two:
        windows.lock_file(one, waiting)
        assert not said
        windows.lock_file(two, waiting)
    assert said == ["waiting"]


def test_memory_is_told_or_nothing_is_claimed(windows: ModuleType) -> None:
    assert windows.peak_memory() == 0.0  # these counters are Windows' own
    assert system.peak_memory() > 10e6


def test_flock_keeps_another_process_out_until_it_is_closed(tmp_path: Path) -> None:
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with (tmp_path / "lock").open("w") as file:
        system.lock_file(file, lambda: pytest.fail("nobody has it"))
        other = [sys.executable, "-c", code, str(tmp_path / "lock")]
        assert subprocess.run(other, capture_output=True, check=False).returncode != 0
    assert subprocess.run(other, capture_output=True, check=False).returncode == 0


def test_no_other_module_needs_unix() -> None:
    root = Path(system.__file__).parents[1]
    own = {"core/system.py", "core/lock.py", "core/atomic.py", "core/signals.py", "classifier/web/uploads.py"}
    files = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in root.rglob("*.py")}
    words = ("import fcntl", "import resource\n", "os.pwrite(", "signal.SIGKILL", "signal.SIGHUP")
    assert not [
        (name, word) for name, text in files.items() for word in words if word in text and name not in own
    ]
