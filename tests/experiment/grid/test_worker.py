"""The log of a cell: failing to write it does not stop the job."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cofima.experiment.grid import shared_first_task
from cofima.experiment.grid.executors.base import Job
from cofima.experiment.grid.worker import LOG, Log, learn


def test_a_log_that_cannot_be_written_is_the_fault_of_its_cell(tiny, tmp_path: Path) -> None:
    (tmp_path / "cell" / LOG).mkdir(parents=True)
    said = learn(Job(tiny.config(), tmp_path / "cell"))
    assert said == f"{tmp_path / 'cell' / LOG} could not be written (Is a directory)"


def test_a_full_disk_under_a_log_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        Log().say("that there is no room for this must not end the training")
        with suppress(OSError):  # it has no room for the rest either
            full.close()


def test_a_damaged_first_task_that_cannot_be_removed_is_learned_by_each_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "CURRENT").write_text("0001\n")
    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "rmdir", refuse)
    assert not shared_first_task.learned(tmp_path)
