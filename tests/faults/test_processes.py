"""Writers and readers in processes of their own, without pauses: no change is lost, nothing mixed is read.

Each change names a class of its own, so that what is in the folder in the end tells which changes were made.
"""

import multiprocessing
import os
import shutil
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from cofima.classifier.classifier import changing, load
from cofima.core.errors import CofimaError
from cofima.store import model_folder
from cofima.store.model import load_model

WRITERS, READERS = 3, 2
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    """Return a model folder with a class for each writer."""
    tiny.run(tmp_path / "model", tiny.config(train={"epochs": 0}), tiny.stream((WRITERS,), per_class=4))
    return tmp_path / "model"


def start(target: Any, *given: Any) -> Any:
    """Start a process; a failure in it is printed, and seen by its exit code."""

    def run() -> None:
        try:
            torch.set_num_threads(1)
            target(*given)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    process = FORK.Process(target=run)
    process.start()
    return process


class Goal:
    """Until when to go on: some seconds, and then until everybody has done something, but not for ever."""

    def __init__(self, seconds: float, *counts: Any) -> None:
        self.until, self.last, self.counts = (
            time.monotonic() + seconds,
            time.monotonic() + 60 + seconds,
            counts,
        )

    def is_far(self) -> bool:
        now = time.monotonic()
        return now < self.until or (now < self.last and min(sum(count) for count in self.counts) < 2)


def renames(folder: Path, writer: int, goal: Goal, done: Any, python: bool) -> None:
    """Give the class of this writer the next number, again and again; refused changes are tried again."""
    while goal.is_far():
        try:
            if python:  # without the lock from reading to writing: refused if it was overtaken
                made = load(folder)
                made.rename(made.classes[writer], f"{writer}.{done[writer] + 1}")
                made.save()
            else:
                with changing(folder) as made:
                    made.rename(made.classes[writer], f"{writer}.{done[writer] + 1}")
        except CofimaError as error:
            if "is being written by" not in str(error) and "has changed since" not in str(error):
                raise
        else:
            done[writer] += 1


def reads(folder: Path, goal: Goal, seen: Any, reader: int) -> None:
    """Load again and again: the classes of the record are those that its history tells of."""
    while goal.is_far():
        model = load_model(folder)
        named = [f"blob {number}" for number in range(WRITERS)]
        for row in model.history:
            if row.kind == "rename":
                old, new = row.classes
                named[named.index(old)] = new
        assert sorted(model.classes) == sorted(named), (model.classes, named)
        seen[reader] += 1


def undoes(folder: Path, goal: Goal, done: Any) -> None:
    while goal.is_far():
        try:
            model_folder.undo(folder)
            done[0] += 1
        except CofimaError as error:
            if "is being written by" not in str(error) and "nothing to undo" not in str(error):
                raise


@pytest.mark.parametrize("seconds", [0.3, pytest.param(30.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("python", [False, True])
def test_no_change_is_lost_and_nothing_mixed_is_read(python: bool, seconds: float, folder: Path) -> None:
    done, seen = FORK.Array("l", WRITERS), FORK.Array("l", READERS)
    goal = Goal(seconds, done, seen)
    running = [start(renames, folder, writer, goal, done, python) for writer in range(WRITERS)]
    running += [start(reads, folder, goal, seen, reader) for reader in range(READERS)]
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0] * len(running)
    print(f"{sum(done)} changes, {sum(seen)} readings")
    model = load_model(folder)
    assert min(sum(done), sum(seen)) > 1
    wanted = [f"{writer}.{done[writer]}" if done[writer] else f"blob {writer}" for writer in range(WRITERS)]
    assert model.classes == wanted
    assert len([row for row in model.history if row.kind == "rename"]) == sum(done)


@pytest.mark.parametrize("seconds", [0.3, pytest.param(30.0, marks=pytest.mark.slow)])
def test_nothing_mixed_is_read_while_others_undo(seconds: float, folder: Path) -> None:
    changed, undone, seen = FORK.Array("l", WRITERS), FORK.Array("l", 1), FORK.Array("l", READERS)
    goal = Goal(seconds, changed, undone, seen)
    running = [start(renames, folder, 0, goal, changed, False), start(undoes, folder, goal, undone)]
    running += [start(reads, folder, goal, seen, reader) for reader in range(READERS)]
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0] * len(running)
    print(f"{sum(changed)} changes, {undone[0]} undone, {sum(seen)} readings")
    assert min(sum(changed), undone[0], sum(seen)) > 1
    load_model(folder)
    assert len(list(folder.glob("[0-9]*"))) <= 3


def test_a_copy_of_the_folder_is_not_the_folder(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    made = load(folder)
    made.rename(made.classes[0], "new")
    with pytest.raises(CofimaError, match="holds a model already"):
        made.save(tmp_path / "copy")
