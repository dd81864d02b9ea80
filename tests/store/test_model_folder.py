"""Writing of generations: after a kill or a fault at any step, the previous generation is current."""

import errno
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cofima
from cofima.core.errors import CofimaError
from cofima.experiment.grid import shared_first_task
from cofima.experiment.launch import launch
from cofima.experiment.metrics_log import METRICS
from cofima.store import generation, model_folder
from cofima.store import model as model_module
from cofima.store.generation import CURRENT
from cofima.store.model import load_model, save_model
from cofima.store.model_folder import INFLIGHT
from cofima.store.record import BACKBONE, CONFIG, HEAD, HISTORY, STATE

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

        def save(folder: Path) -> None:
            save_model(replace(model, generation=model_folder.read(folder)), folder)

        return Writer(place, save, 2, 6)
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
    read = model_folder.read(folder)
    read.verify()
    return sum(map(len, read.record.tasks))


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
    assert classes(writer.place) == len(load_model(writer.place).classes) == writer.after
    listed = names(writer.place)
    states = [classes(folder) for folder in found]
    assert states == sorted(states)  # from the old state to the new one, once
    assert set(states) == {writer.before, writer.after}
    for folder, state in zip(found, states, strict=True):
        if state == writer.before:
            writer.write(folder)
            assert classes(folder) == writer.after
            assert names(folder) == listed


def test_a_fault_at_any_step_is_said_and_leaves_the_state_before(writer: Writer, tmp_path: Path) -> None:
    """The disk is full, or broken, in turn."""
    before = content(writer.place) if writer.place.is_dir() else {}
    steps: list[int] = []
    with before_every_change(steps.append):
        writer.write(beginning(writer, tmp_path / "whole"))
    refused: list[tuple[str, str]] = []
    for step in steps:
        place = beginning(writer, tmp_path / str(step))
        code = (errno.ENOSPC, errno.EIO)[step % 2]

        def fail(at: int, step: int = step, code: int = code) -> None:
            if at == step:
                raise OSError(code, os.strerror(code))

        try:
            with before_every_change(fail):
                writer.write(place)
        except CofimaError as error:
            refused.append((os.strerror(code), str(error)))
        if classes(place) != writer.after:
            there = content(place) if place.is_dir() else {}
            assert {name: there.get(name) for name in before} == before, step
            assert names(place) == (names(writer.place) if before else []), step
    assert len(refused) > 8
    assert all(reason in text for reason, text in refused)
    assert len({reason for reason, _ in refused}) == 2


def names(folder: Path) -> list[str]:
    """Return what is in a folder, but for numbers: one that a killed process took is not used again."""
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return sorted("generation" if name.isdigit() else name for name in found - {".lock", METRICS})


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


@pytest.mark.parametrize("name", [BACKBONE, HEAD, STATE, HISTORY])
def test_each_file_is_verified_when_it_is_read(name: str, runs: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(runs / "whole", tmp_path / "model"))
    found = model_folder.read(place)
    with found.place(name).open("ab") as file:
        file.write(b"\n")
    read = {(BACKBONE, HEAD): found.weights, (STATE,): found.state, (HISTORY,): found.history}
    for others, call in read.items():
        if name in others:
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
from cofima.store import generation, model_folder
from cofima.store.generation import CURRENT
folder = Path({str(runs / "whole")!r})
print(len(model_folder.read_history(folder)), model_folder.read(folder).record.method.label)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "CoMA"]


# --- numbers, parents and undo -----------------------------------------------------------------------


@pytest.fixture
def place(runs: Path, tmp_path: Path) -> Path:
    """Return a copy of a run of one task."""
    return Path(shutil.copytree(runs / "first", tmp_path / "model"))


def change(folder: Path, word: str, **how: bool) -> Path:
    """Write a generation that can be told by a word; return its path."""
    model = load_model(folder)
    model.data = {"word": word}
    save_model(model, folder, **how)
    return model_folder.current(folder)


def word(folder: Path) -> str:
    return load_model(folder).data.get("word", "first")


def test_a_number_is_never_used_again(place: Path) -> None:
    seen = [change(place, "a").name]
    for text in ("b", "c"):
        model_folder.undo(place)
        assert word(place) == "first"
        seen.append(change(place, text).name)
    assert seen == ["0002", "0003", "0004"]
    assert sorted(path.name for path in place.glob("0*")) == ["0001", "0004"], "what was undone is removed"
    model_folder.undo(place)
    assert word(place) == "first"
    with pytest.raises(CofimaError, match="nothing to undo; no state before 0001"):
        model_folder.undo(place)


def test_what_was_undone_is_removed_from_a_folder_that_keeps_all(tiny, tmp_path: Path) -> None:
    config = tiny.config(train={"epochs": 0}, keep_checkpoints=True)
    launch(config, tmp_path)
    model_folder.undo(tmp_path)
    launch(config, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("0*")) == ["0001", "0002", "0004"]
    found = [model_folder.ancestor(tmp_path, tasks) for tasks in (1, 2, 3, 4)]
    assert [path and path.name for path in found] == ["0001", "0002", "0004", None]


def test_a_generation_may_take_the_place_of_another(place: Path) -> None:
    change(place, "stage 1")
    change(place, "stage 2", replaces=True)
    change(place, "stage 3", replaces=True)
    assert sorted(path.name for path in place.glob("0*")) == ["0001", "0004"]
    model_folder.undo(place)
    assert word(place) == "first"


def test_nothing_is_before_a_first_generation_that_was_replaced(place: Path) -> None:
    change(place, "stage 2", replaces=True)
    assert [path.name for path in place.glob("0*")] == ["0002"]
    with pytest.raises(CofimaError, match="nothing to undo"):
        model_folder.undo(place)


def test_ten_thousand_follows_9999(place: Path) -> None:
    (place / "0001").rename(place / "9999")
    (place / CURRENT).write_text("9999\n")
    assert change(place, "a").name == "10000"
    assert change(place, "b").name == "10001"
    assert word(place) == "b"
    model_folder.undo(place)
    assert word(place) == "a"
    assert change(place, "c").name == "10002"
    assert sorted(path.name for path in place.glob("[0-9]*")) == ["10000", "10002"]


@pytest.mark.parametrize("name", ["00001", "٠٠٠١", "0x01", "1e03", "001", "0001.old", "1_000", "9" * 19])
def test_what_only_looks_like_a_number_is_neither_read_nor_removed(name: str, place: Path) -> None:
    shutil.copytree(place / "0001", place / name)
    before = content(place / name)
    assert change(place, "a").name == "0002"
    assert change(place, "b").name == "0003"
    assert content(place / name) == before
    (place / CURRENT).write_text(name)
    with pytest.raises(CofimaError, match="which is not there"):
        model_folder.read(place)


def test_a_folder_of_the_user_is_not_removed_for_a_file_of_the_same_name(place: Path) -> None:
    mine = place / "0000"
    mine.mkdir()
    (mine / CONFIG).write_text('{"mine": 1}')
    change(place, "a")
    change(place, "b")
    assert (mine / CONFIG).read_text() == '{"mine": 1}'


# --- backbones ---------------------------------------------------------------------------------------


def train(folder: Path) -> Path:
    """Write a generation whose backbone moved; return its path."""
    model = load_model(folder)
    with torch.no_grad():
        for weight in model.method.net.backbone.parameters():
            weight.add_(0.5)
    save_model(model, folder)
    return model_folder.current(folder)


def backbones(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("backbone-*"))


def test_generations_that_have_the_same_backbone_share_its_file(place: Path) -> None:
    one = model_folder.read(place)
    change(place, "a")
    two = model_folder.read(place)
    assert two.path != one.path
    assert two.place(BACKBONE) == one.place(BACKBONE)
    assert backbones(place) == [one.place(BACKBONE).name]
    files = [path for path in place.rglob("*") if path.is_file() and path.parent != place]
    shared = one.place(BACKBONE).stat().st_size
    assert one.size + two.size == sum(path.stat().st_size for path in files) + 2 * shared


def test_a_backbone_that_moved_is_kept_until_the_last_generation_that_has_it_is_gone(place: Path) -> None:
    (first,) = backbones(place)
    train(place)
    assert len(backbones(place)) == 2
    moved = model_folder.read(place).place(BACKBONE).name
    model_folder.undo(place)
    assert len(backbones(place)) == 2, "what was undone stays until the next change"
    change(place, "a")
    assert backbones(place) == [first]
    train(place)
    change(place, "b")
    assert backbones(place) == [moved]


def test_no_backbone_is_removed_while_a_generation_cannot_be_read(place: Path) -> None:
    (first,) = backbones(place)
    config = place / "0001" / CONFIG
    whole = config.read_text()
    train(place)
    config.write_text(whole.replace('"tasks"', '"task"'))
    change(place, "a")
    train(place)
    assert first in backbones(place)
    config.write_text(whole)
    model_folder.read(place, place / "0001").verify()


def test_a_damaged_backbone_is_told_of_all_that_share_it_and_the_next_change_mends_it(
    place: Path,
) -> None:
    model = load_model(place)
    change(place, "a")
    shared = model_folder.read(place).place(BACKBONE)
    whole = shared.read_bytes()
    shared.write_bytes(whole[:-1])
    with pytest.raises(CofimaError, match="there is no state before it"):
        load_model(place)
    with pytest.raises(CofimaError, match="sha256 differs"):
        model_folder.undo(place)
    save_model(replace(model, generation=model_folder.read(place)), place)
    assert shared.read_bytes() == whole
    assert word(place) == "first"


# --- several processes -------------------------------------------------------------------------------


def test_a_change_of_what_is_no_longer_in_force_is_refused(place: Path) -> None:
    mine = load_model(place)
    change(place, "other")
    with pytest.raises(CofimaError, match=r"changed since it was loaded \(0001 then, 0002 now\)"):
        save_model(mine, place)
    assert word(place) == "other"


def test_a_save_between_the_reading_of_weights_and_its_end_is_not_lost(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process saves while this one has read the weights, and builds the network."""
    whole = model_module.build_like

    def build(*given: Any) -> Any:
        monkeypatch.setattr(model_module, "build_like", whole)
        change(place, "other")
        return whole(*given)

    monkeypatch.setattr(model_module, "build_like", build)
    mine = cofima.load(place)
    mine.rename(mine.classes[0], "mine")
    with pytest.raises(CofimaError, match="changed since it was loaded"):
        mine.save()
    assert word(place) == "other"


def test_a_folder_made_anew_is_not_taken_for_the_old_one(runs: Path, place: Path) -> None:
    mine = load_model(place)
    change(place, "other", replaces=True)
    (place / "0002").rename(place / "0001")
    (place / CURRENT).write_text("0001")
    with pytest.raises(CofimaError, match="changed since it was loaded"):
        save_model(mine, place)


@pytest.mark.parametrize("name", [CONFIG, BACKBONE, HEAD, STATE, HISTORY])
def test_a_reader_whose_generation_vanishes_reads_the_next(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, file = generation.open_file, model_folder.read(place).place(name).name

    def opened(path: Path) -> Any:
        if path.name == file:
            monkeypatch.setattr(generation, "open_file", whole)
            change(place, "between")
            change(place, "new")  # the one that is being read is removed
        return whole(path)

    monkeypatch.setattr(generation, "open_file", opened)
    found = load_model(place)
    assert (found.data, found.generation.name) == ({"word": "new"}, "0003")
    assert len(found.history) == 1


def test_a_reader_that_is_overtaken_before_it_opens_anything_reads_the_next(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model_folder.is_generation

    def overtaken(path: Path) -> bool:
        monkeypatch.setattr(model_folder, "is_generation", whole)
        change(place, "between")
        change(place, "new")
        return whole(path)

    monkeypatch.setattr(model_folder, "is_generation", overtaken)
    assert model_folder.current(place).name == "0003"
