"""Uploads do not outlive the page: gone when it ends, on SIGTERM, and at the next start after a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cofima.classifier.web.uploads import PREFIX, clear, upload_folder

PAGE = """
import sys, time
from pathlib import Path
from cofima.classifier.web.uploads import upload_folder
from cofima.core.signals import handle_signals
try:
    with handle_signals(), upload_folder(Path(sys.argv[1])) as uploads:
        (uploads / "photo.jpg").write_text("private")
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    pass
"""


def started(parent: Path) -> "subprocess.Popen[str]":
    page = subprocess.Popen([sys.executable, "-c", PAGE, str(parent)], stdout=subprocess.PIPE, text=True)
    assert page.stdout is not None
    assert page.stdout.readline() == "ready\n"
    return page


def test_they_are_removed_at_the_end_and_by_nobody_before(tmp_path: Path) -> None:
    with upload_folder(tmp_path) as one:
        (one / "a").write_text("a")
        page = started(tmp_path)  # another page, which removes nothing of this one
        try:
            assert (one / "a").is_file()
            clear(tmp_path)
            assert len(list(tmp_path.iterdir())) == 2
        finally:
            page.send_signal(signal.SIGTERM)
            page.wait(30)
        assert list(tmp_path.iterdir()) == [one.parent]
    assert not list(tmp_path.iterdir())


def test_after_a_kill_the_next_start_removes_them(tmp_path: Path) -> None:
    page = started(tmp_path)
    page.kill()
    page.wait(30)
    (left,) = tmp_path.glob("*/files/photo.jpg")
    with upload_folder(tmp_path):
        assert not left.exists()
        assert len(list(tmp_path.iterdir())) == 1


def test_what_is_not_a_page_s_own_folder_is_left_alone(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / ".lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(photos)
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}starting").mkdir()
    (tmp_path / f"{PREFIX}old").mkdir()
    os.utime(tmp_path / f"{PREFIX}old", (0, time.time() - 3600))
    clear(tmp_path)
    left = {path.name.removeprefix(PREFIX) for path in tmp_path.iterdir()}
    assert left == {"photos", "link", "file", "starting"}
    assert (photos / ".lock").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of somebody else")
def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}other"
    other.mkdir()
    (other / ".lock").touch()
    os.chown(other, 12345, 12345)
    clear(tmp_path)
    assert other.is_dir()
