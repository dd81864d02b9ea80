"""The one writer of generations: a kill or a fault at any step leaves the state before in force."""

import errno
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cofima
from cofima.core.errors import CofimaError
from cofima.experiment.grid import shared_first_task
from cofima.experiment.launch import launch
from cofima.store import model as model_module
from cofima.store import model_folder
from cofima.store.model import load_model, save_model
from cofima.store.model_folder import HISTORY, INFLIGHT, STATE, WEIGHTS

CHANGES = ("fsync", "replace", "mkdir", "link", "rmdir", "unlink")


@dataclass
class Writer:
    """Something that writes the next generation of a model folder.

    Attributes:
        place: The folder, which may be written again and again.
        write: Writes into a folder.
        before: How many classes the model had, 0 where there was none.
        after: How many it has then.
    """

    place: Path
    write: Callable[[Path], object]
    before: int
    after: int


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with runs of one and of three tasks."""
    place = tmp_path_factory.mktemp("runs")
    config = tiny.config(
        "coma", train={"epochs": 1}, options={"align": {"epochs": 1, "samples_per_class": 4}}
    )
    launch(config, place / "first", tasks=1)
    launch(config, place / "whole")
    return place


@pytest.fixture(params=["save", "take", "merge", "forced merge"])
def writer(request: pytest.FixtureRequest, runs: Path, tmp_path: Path) -> Writer:
    """Return each of the users of the writer in turn."""
    place, first, whole = tmp_path / "model", runs / "first", runs / "whole"
    if request.param == "save":
        shutil.copytree(first, place)
        (place / INFLIGHT).mkdir()
        model = load_model(whole)
        return Writer(place, lambda folder: save_model(model, folder), 2, 6)
    if request.param == "take":
        config = load_model(first).config.model_copy(update={"keep_checkpoints": True})
        return Writer(place, lambda folder: shared_first_task.take(first, config, folder), 0, 2)
    if request.param == "merge":
        return Writer(place, lambda folder: cofima.merge([first, whole], folder), 0, 6)
    shutil.copytree(first, place)
    return Writer(place, lambda folder: cofima.merge([first, whole], folder, force=True), 2, 6)


@contextmanager
def before_every_change(act: Callable[[int], None]) -> Iterator[None]:
    """Call ``act`` with 1, 2, ... before every step that changes the disk; not for what it does itself."""
    count, acting = 0, False

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count, acting
            changes = real is not io_open or set(args[1] if len(args) > 1 else "r") & set("wax+")
            if changes and not acting:
                count, acting = count + 1, True
                try:
                    act(count)
                finally:
                    acting = False
            return real(*args, **options)

        return call

    io_open = io.open
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, watched(getattr(os, name)))
        patch.setattr(io, "open", watched(io_open))
        patch.setattr(model_module, "save_file", watched(model_module.save_file))
        yield


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def classes(folder: Path) -> int:
    """Return how many classes the model in force has, every file of it verified; 0 without one."""
    if model_folder.current(folder) is None:
        return 0
    model_folder.read(folder).verify()
    return len(load_model(folder).classes)


def test_a_kill_at_any_step_leaves_the_old_or_the_new_state_and_can_be_repeated(
    writer: Writer, tmp_path: Path
) -> None:
    found: list[Path] = []

    def keep(step: int) -> None:
        found.append(tmp_path / "killed" / str(step))
        if writer.place.is_dir():
            shutil.copytree(writer.place, found[-1])

    with before_every_change(keep):
        writer.write(writer.place)
    assert classes(writer.place) == writer.after
    listed = sorted(path.name for path in writer.place.iterdir())
    states = [classes(folder) for folder in found]
    assert states == sorted(states)  # from the old state to the new one, once
    assert set(states) == {writer.before, writer.after}
    for folder, state in zip(found, states, strict=True):
        if state == writer.before:
            writer.write(folder)
            assert classes(folder) == writer.after
            assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == listed


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_fault_at_any_step_is_said_and_leaves_the_state_before(
    code: int, writer: Writer, tmp_path: Path
) -> None:
    before = content(writer.place) if writer.place.is_dir() else {}
    steps: list[int] = []
    with before_every_change(steps.append):
        writer.write(beginning(writer, tmp_path / "whole"))
    refused: list[str] = []
    for step in steps:
        place = beginning(writer, tmp_path / str(step))

        def fail(at: int, step: int = step) -> None:
            if at == step:
                raise OSError(code, os.strerror(code))

        try:
            with before_every_change(fail):
                writer.write(place)
        except CofimaError as error:
            refused.append(str(error))
        if classes(place) != writer.after:
            there = content(place) if place.is_dir() else {}
            assert {name: there.get(name) for name in before} == before, step
            assert not [name for name in there if name.startswith(".")], step
    assert len(refused) > 8
    assert all(os.strerror(code) in text for text in refused)


def beginning(writer: Writer, place: Path) -> Path:
    """Return a copy of the folder as it was before anything is written."""
    if writer.place.is_dir():
        shutil.copytree(writer.place, place)
    return place


def test_a_forced_merge_is_a_generation_that_can_be_undone(runs: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(runs / "first", tmp_path / "model"))
    cofima.merge([runs / "first", runs / "whole"], place, force=True)
    assert classes(place) == 6
    model_folder.undo(place)
    assert classes(place) == 2
    assert content(place / "0001") == content(runs / "first" / "0001")


def test_a_forced_merge_leaves_what_else_is_in_the_folder(runs: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(runs / "first", tmp_path / "model"))
    (place / "notes.txt").write_text("mine")
    cofima.merge([runs / "first", runs / "whole"], place, force=True)
    assert (place / "notes.txt").read_text() == "mine"
    (place / "1993").mkdir()
    (place / "1993" / "notes.txt").write_text("mine")
    with pytest.raises(CofimaError, match="holds 1993"):
        cofima.merge([runs / "first", runs / "whole"], place, force=True)


def test_a_damaged_state_can_be_undone(runs: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(runs / "whole", tmp_path / "model"))
    for file in (place / "0003").iterdir():
        file.write_bytes(b"damaged")
    left, now = model_folder.undo(place)
    assert (left.name, now.name, classes(place)) == ("0003", "0002", 4)


@pytest.mark.parametrize("name", [WEIGHTS, STATE, HISTORY])
def test_each_file_is_verified_when_it_is_read(name: str, runs: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(runs / "whole", tmp_path / "model"))
    with (place / "0003" / name).open("ab") as file:
        file.write(b"\n")
    generation = model_folder.read(place)
    read = {WEIGHTS: generation.weights, STATE: generation.state, HISTORY: generation.history}
    for other, call in read.items():
        if other == name:
            with pytest.raises(CofimaError, match="sha256 differs"):
                call()
        else:
            call()


def test_the_facts_of_a_method_are_in_the_folder(tiny, tmp_path: Path) -> None:
    for method, facts in (("joint", (True, False)), ("gdumb", (False, True))):
        tiny.run(
            tmp_path / method, tiny.config(method, train={"epochs": 0}), tiny.stream((2, 2), per_class=4)
        )
        found = model_folder.read(tmp_path / method).record.method
        assert (found.all_at_once, found.keeps_images) == facts


def test_histories_are_read_without_torch(runs: Path) -> None:
    code = f"""
import sys, types
from pathlib import Path
package = types.ModuleType("cofima")
package.__path__ = [{str(Path(cofima.__file__).parent)!r}]  # the package itself may import more
sys.modules |= {{"cofima": package, "torch": None, "timm": None}}
from cofima.store import model_folder
folder = Path({str(runs / "whole")!r})
print(len(model_folder.read_history(folder)), model_folder.read(folder).record.method.label)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "CoMA"]
