"""Atomic writes: complete or not at all, without leftover temporary files."""

import hashlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cofima.core import atomic
from cofima.core.atomic import (
    clear_aside,
    file_digest,
    json_digest,
    open_append,
    open_file,
    write_aside,
    write_text,
)
from cofima.core.errors import CofimaError


class Crash(BaseException):
    """Exception that none of our handlers may catch."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("no"), Crash()])
def test_a_failure_keeps_the_old_file_and_leaves_nothing_aside(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")
    told = CofimaError if isinstance(error, OSError) else type(error)

    def write() -> None:
        with write_aside(path) as aside:
            aside.write_text("new")
            raise error

    with pytest.raises(told):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_has_its_name_before_its_content_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    replace = os.replace

    def rename(source: Path, target: Path) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(atomic, "sync", lambda path: steps.append(path.name.rpartition(".")[2]))
    monkeypatch.setattr(os, "replace", rename)
    with write_aside(tmp_path / "folder") as aside:
        aside.mkdir()
        (aside / "a").write_text("a")
    assert steps == ["a", "folder", "rename", tmp_path.name]


def test_a_folder_replaces_nothing_but_an_empty_one(tmp_path: Path) -> None:
    place = tmp_path / "folder"
    for content in ("first", "second"):
        with (
            pytest.raises(CofimaError) if content == "second" else nullcontext(),
            write_aside(place) as aside,
        ):
            aside.mkdir()
            (aside / "content").write_text(content)
    assert (place / "content").read_text() == "first"
    assert list(tmp_path.iterdir()) == [place]


def test_the_suffix_stays_and_two_writers_do_not_meet(tmp_path: Path) -> None:
    with write_aside(tmp_path / "x.onnx") as one, write_aside(tmp_path / "x.onnx") as two:
        assert one != two
        assert one.suffix == ".onnx"
        one.write_text("1")
        two.write_text("2")
    assert (tmp_path / "x.onnx").read_text() == "1"  # who ends last


def test_only_what_was_left_aside_is_cleared(tmp_path: Path) -> None:
    left = [tmp_path / f".{'0a' * 16}.{name}" for name in ("CURRENT", "0001")]
    left[0].write_text("0001")
    left[1].mkdir()
    (left[1] / "file").write_text("half")
    others = [tmp_path / name for name in (".git", ".cafe.txt", "0001")]
    for other in others:
        other.mkdir()
    clear_aside(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_digests_are_sha256_and_do_not_depend_on_the_order_of_keys(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None], "a": {"d": "é", "c": (1,)}}
    assert json_digest(value) == json_digest(json.loads(json.dumps(dict(reversed(value.items())))))
    # as names of grid folders have been made from the beginning
    assert json_digest({"a": 1})[:8] == "f9d86028"
    (tmp_path / "file").write_bytes(b"content")
    assert file_digest(tmp_path / "file") == hashlib.sha256(b"content").hexdigest()


def test_what_a_killed_process_left_aside_is_cleared_by_the_next_who_writes_there(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from cofima.core.atomic import write_aside
with write_aside(Path(sys.argv[1])) as aside:
    aside.write_text("half")
    os._exit(9)
"""
    target, other = tmp_path / "report [1].html", tmp_path / "other.html"
    for path in (target, other):
        subprocess.run([sys.executable, "-c", code, path], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    with write_aside(target) as alive:
        alive.write_text("half")
        write_text(target, "whole")
        assert alive.exists(), "its process is alive"
    assert sorted(path.name.rpartition(".")[0][34:] or path.name for path in tmp_path.iterdir()) == [
        "other",
        target.name,
    ]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_of_the_umask_whoever_wrote_them(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        with write_aside(tmp_path / "folder") as aside:
            aside.mkdir()
            (aside / "text").write_text("x")
            save_file({"x": torch.zeros(1)}, aside / "tensors")
            (aside / "private").touch(0o600)
        write_text(tmp_path / "file", "x")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {0o666 & ~mask}


def test_nothing_is_appended_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic"):
        open_append(tmp_path / "link")
    for text in ("a\n", "b\n"):
        with open_append(tmp_path / "new") as file:
            file.write(text)
    assert (tmp_path / "new").read_text() == "a\nb\n"


@pytest.mark.parametrize("make", [getattr(os, "mkfifo", os.mkdir), os.mkdir])
def test_what_is_no_file_is_not_opened(make, tmp_path: Path) -> None:
    make(tmp_path / "odd")
    with pytest.raises(OSError, match="not a file"):
        open_file(tmp_path / "odd")


def test_only_the_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    atomic.remove_aside(tmp_path / "link")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["mine", "mine/file"]
