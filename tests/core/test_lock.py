"""One process at a time writes into a folder."""

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from cofima import learn
from cofima.cli.model import extend
from cofima.core import lock
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.core.lock import folder_lock
from cofima.core.system import UNIX
from cofima.experiment.launch import launch
from cofima.store import model_folder
from cofima.store.model import load_model, save_model

HOLD = """
import sys, time
from pathlib import Path
from cofima.core.lock import folder_lock
with folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path):
    """Another process that holds the folder."""
    folder = tmp_path / "model"
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process, folder
    process.kill()
    process.wait()
    process.stdout.close()


def test_what_another_process_holds_is_refused_until_it_is_killed(other, tiny) -> None:
    process, folder = other
    with pytest.raises(CofimaError, match=rf"is being written by process {process.pid} on .* since .*end it"):
        launch(tiny.config(train={"epochs": 1}), folder)
    assert {path.name for path in folder.iterdir()} == {lock.NAME, lock.HOLDER}, "nothing was changed"
    stream = tiny.stream((2,), per_class=4)
    model = tiny.model(tiny.config(train={"epochs": 1}), stream)
    with pytest.raises(CofimaError, match=f"process {process.pid}"):
        save_model(model, folder)
    process.kill()
    process.wait()
    assert (folder / lock.NAME).exists(), "a killed process takes nothing away"
    with folder_lock(folder):
        pass
    assert not folder.exists() or not list(folder.iterdir())


def held_elsewhere(folder: Path) -> int:
    """Hold a folder as another process does: the system tells open files apart, not processes."""
    folder.mkdir(exist_ok=True)
    handle = os.open(folder / lock.NAME, os.O_RDWR | os.O_CREAT)
    assert lock.try_lock_file(handle)
    return handle


def test_everything_that_writes_asks_and_reading_does_not(tiny, tmp_path: Path) -> None:
    stream = tiny.stream((2,), per_class=4)
    model = tiny.run(tmp_path, tiny.config(train={"epochs": 1}), stream)
    save_model(model, tmp_path)
    handle = held_elsewhere(tmp_path)
    for write in (lambda: save_model(model, tmp_path), lambda: model_folder.undo(tmp_path)):
        with pytest.raises(CofimaError, match="is being written by another process"):
            write()
    photos = tmp_path / "no such photos"  # refused before they are looked for
    for write in (lambda: learn(photos, tmp_path / "other"), lambda: extend(tmp_path, photos)):
        other = held_elsewhere(tmp_path / "other")
        with pytest.raises(CofimaError, match="is being written by another process"):
            write()
        os.close(other)
    assert load_model(tmp_path).classes == model.classes
    os.close(handle)
    model_folder.undo(tmp_path)


def test_a_holder_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    handle = held_elsewhere(tmp_path)
    threading.Timer(0.5, lambda: os.close(handle)).start()
    with folder_lock(tmp_path, timeout=60):
        assert (tmp_path / lock.HOLDER).read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / lock.HOLDER).exists()


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    def enter(timeout: float) -> str:
        try:
            with folder_lock(tmp_path, timeout), folder_lock(tmp_path):
                return "entered"
        except CofimaError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        with folder_lock(tmp_path):
            assert "is being written by another thread of this process" in pool.submit(enter, 0).result()
            waiting = pool.submit(enter, 60)
            time.sleep(0.05)
            assert not waiting.done()
        assert waiting.result() == "entered"


def test_the_file_stays_in_a_folder_in_use(tmp_path: Path) -> None:
    """Two who wait for one file must not end with a file each."""
    (tmp_path / "model").touch()
    with folder_lock(tmp_path):
        file = (tmp_path / lock.NAME).stat()
    assert os.path.samestat((tmp_path / lock.NAME).stat(), file)


@pytest.mark.parametrize("name", [lock.NAME, lock.HOLDER])
@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_nothing_is_written_through_a_link(name: str, make, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "model").mkdir()
    make(tmp_path / "mine.txt", tmp_path / "model" / name)
    refused = name == lock.NAME and make is os.symlink
    with (
        pytest.raises(CofimaError, match=r"\.lock is a symbolic link") if refused else nullcontext(),
        folder_lock(tmp_path / "model"),
    ):
        pass
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    with folder_lock(deep), folder_lock(deep):  # who holds it may hold it once more
        assert (deep / lock.HOLDER).read_text().startswith(f"process {os.getpid()} on ")
    assert not list(tmp_path.iterdir())
    with folder_lock(deep):
        (deep / "file").write_text("x")
    assert {path.name for path in deep.iterdir()} == {"file", lock.NAME}


@pytest.mark.skipif(not UNIX, reason="nothing that is open can be taken away")
def test_a_file_that_its_holder_took_away_is_not_mistaken_for_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, the holder goes and takes the file with it."""
    whole, taken = lock.try_lock_file, []

    def try_lock_file(handle: int) -> bool:
        if not taken:
            taken.append((tmp_path / lock.NAME).unlink())
        return whole(handle)

    monkeypatch.setattr(lock, "try_lock_file", try_lock_file)
    with folder_lock(tmp_path):
        assert (tmp_path / lock.NAME).exists()
        again = os.open(tmp_path / lock.NAME, os.O_RDWR)
        assert not whole(again)
        os.close(again)


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def try_lock_file(handle: int) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "try_lock_file", try_lock_file)
    with pytest.warns(CofimaWarning, match="has no locks"), folder_lock(tmp_path):
        (tmp_path / "file").write_text("x")
    assert {path.name for path in tmp_path.iterdir()} == {"file", lock.NAME}


def test_the_file_of_another_user_locks_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").touch()
    with folder_lock(tmp_path):
        pass
    whole = os.open

    def opened(path, how, *mode):
        if Path(path).name == lock.NAME and how & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return whole(path, how, *mode)

    monkeypatch.setattr(os, "open", opened)
    with folder_lock(tmp_path):
        again = whole(tmp_path / lock.NAME, os.O_RDONLY)
        assert not lock.try_lock_file(again)
        os.close(again)


def test_a_lock_of_one_file_is_waited_for_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PAUSE", 0.01)
    held, said = held_elsewhere(tmp_path), []

    def waiting() -> None:
        said.append("waiting")
        os.close(held)

    handle = os.open(tmp_path / lock.NAME, os.O_RDWR)
    lock.lock_file(handle, waiting)
    again = os.open(tmp_path / lock.NAME, os.O_RDWR)
    assert not lock.try_lock_file(again)
    os.close(handle)
    lock.lock_file(again, waiting)
    os.close(again)
    assert said == ["waiting"]
