"""A run interrupted in the middle of a task resumes to bit-identical results."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cofima import methods
from cofima.core import atomic
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.core.signals import Interrupted, handle_signals
from cofima.data.stream import Stream
from cofima.experiment.launch import _interrupted, launch, pending
from cofima.experiment.metrics_log import read
from cofima.experiment.run import run
from cofima.methods import Batch, Method
from cofima.store import model_folder
from cofima.store.model import Model, load_model
from cofima.training import checkpoint
from cofima.training.checkpoint import Budget, RunCheckpoint
from cofima.weights.mmap import MappedFile

QUICK = {"epochs": 2, "batch_size": 4}
GROUPS = (2, 1, 2)  # a task of one class has random streams of its own


class Killed(BaseException):
    """An interruption that no method and no run can catch, as kill -9."""


class Ears(Progress):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def say(self, message: str) -> None:
        self.heard.append(message)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write after every step."""
    monkeypatch.setattr(Budget, "due", lambda self: True)


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets the process die after so many steps."""
    whole, left = RunCheckpoint.offer, [0]

    def offer(self: RunCheckpoint, step: int) -> None:
        whole(self, step)
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    monkeypatch.setattr(RunCheckpoint, "offer", offer)

    def arrange(steps: int) -> None:
        left[0] = steps

    return arrange


def go_on(tiny, config: Any, stream: Stream, folder: Path, progress: Progress = SILENT) -> Model:
    """Learn as a fresh process does: from what is on disk, and nothing else."""
    started = model_folder.current(folder) is not None
    model = load_model(folder, progress=progress) if started else tiny.model(config, stream, progress)
    return run(model, model.method.stream(stream), folder, progress)


def tensors(folder: Path) -> dict[str, Tensor]:
    generation = model_folder.read(folder)
    weights = {f"model.{key}": value for key, value in generation.weights().items()}
    return weights | {f"state.{key}": value for key, value in generation.state().items()}


def scores(model: Model) -> list[Any]:
    return [(row.accuracy, row.lam, row.distance, row.notes) for row in model.history]


def lines(folder: Path) -> list[Any]:
    """Return what metrics.jsonl says, but for the time that it took."""
    keys = ("kind", "task", "epoch", "step", "loss", "lr", "seen")
    return [tuple(line.get(key) for key in keys) for line in read(folder)]


# --- every method ----------------------------------------------------------------------------------


# A task's averages, Fisher and alignment; what steps change beside the network; prompts; no steps at all.
# Every method is interrupted twice in tests/methods/test_contract.py.
@pytest.mark.parametrize(
    ("name", "network"),
    [
        *(("cofima", "vit_test"), ("l2p", "vit_test"), ("prototype", "vit_test")),
        *(("ema", "resnet_test"), ("der_pp", "resnet_test")),
    ],
)
def test_killed_again_and_again_it_ends_with_the_same_bits(
    name: str,
    network: str,
    unequal_tasks,
    tmp_path: Path,
    same_bits,
    killed_after,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, whole, cuts = unequal_tasks(name, network), tmp_path / "whole", tmp_path / "cut"
    launch(config, whole)
    assert not (whole / model_folder.INFLIGHT).exists()
    chance = random.Random(f"{name} {network}")
    monkeypatch.setattr(Budget, "due", lambda self: chance.random() < 0.6)  # some steps are lost
    kills = 0
    while True:
        killed_after(chance.randint(2, 6))
        try:
            cut = launch(config, cuts)
            break
        except Killed:
            kills += 1
    trains = any(kind == "epoch" for kind, *_ in lines(whole))
    assert kills >= (2 if trains else 0)
    same_bits(tensors(cuts), tensors(whole))
    assert scores(cut) == scores(load_model(whole))
    assert lines(cuts) == lines(whole)
    assert not (cuts / model_folder.INFLIGHT).exists()


def test_it_goes_on_at_the_step_where_it_was(
    tiny, tmp_path: Path, often, killed_after, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were written are not taken again."""
    config, stream = tiny.config("seq_ft", train=QUICK), tiny.stream((2, 2), per_class=6)
    steps = 2 * 3  # epochs, batches of four of the twelve images
    killed_after(steps + 4)
    with pytest.raises(Killed):
        go_on(tiny, config, stream, tmp_path)
    said = pending(tmp_path)
    assert (said["task"], said["epoch"], said["step"], said["complete"]) == (1, 1, 1, False)
    taken, offer = [], RunCheckpoint.offer
    monkeypatch.setattr(RunCheckpoint, "offer", lambda self, step: taken.append(step) or offer(self, step))
    model = go_on(tiny, config, stream, tmp_path)
    assert taken == [2, 3]
    assert model.history[1].seconds["total"] > said["seconds"]["total"]
    assert model.history[1].seconds["inflight"] > said["seconds"]["inflight"] > 0


def test_killed_after_training_the_training_is_not_repeated(
    tiny, tmp_path: Path, often, killed_after, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stream = tiny.config("cofima", train=QUICK), tiny.stream((2, 2), per_class=4)
    whole = go_on(tiny, config, stream, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(methods.find("cofima"), "align_head", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            go_on(tiny, config, stream, tmp_path / "cut")
    assert pending(tmp_path / "cut")["complete"]
    killed_after(3)  # as soon as the next task trains
    with pytest.raises(Killed):
        go_on(tiny, config, stream, tmp_path / "cut")
    assert len(load_model(tmp_path / "cut").tasks) == 1
    killed_after(-1)
    cut = go_on(tiny, config, stream, tmp_path / "cut")
    same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))
    assert len(whole.tasks) == 2
    assert [row.epochs for row in cut.history] == [row.epochs for row in whole.history] == [2, 2]


@pytest.mark.parametrize(
    ("train", "augment"),
    [
        ({"schedule": "cosine"}, {}),
        ({"momentum": 0.0}, {}),
        ({"balance": 1.0}, {}),
        ({}, {"flip": True, "crop": 0.5}),
    ],
)
def test_other_ways_to_train_go_on_as_well(
    train: dict[str, Any], augment: dict[str, Any], tiny, tmp_path: Path, often, killed_after, same_bits
) -> None:
    config = tiny.config("seq_ft", train=QUICK | {"epochs": 3} | train)
    stream = tiny.stream((3,), per_class=4)
    few = stream[0].train.select(torch.arange(len(stream[0].train)) != 0)  # classes of unequal size
    stream = replace(stream, tasks=(replace(stream[0], train=few),), **augment)
    go_on(tiny, config, stream, tmp_path / "whole")
    for steps in (2, 3, 2):  # within an epoch, at its end, and within the last
        killed_after(steps)
        with pytest.raises(Killed):
            go_on(tiny, config, stream, tmp_path / "cut")
    killed_after(-1)
    go_on(tiny, config, stream, tmp_path / "cut")
    same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))


@pytest.mark.usefixtures("fresh_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_step_and_loses_none(
    number: int, tiny, tmp_path: Path, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stream = tiny.config("seq_ft", train=QUICK), tiny.stream((2,), per_class=4)
    go_on(tiny, config, stream, tmp_path / "whole")
    steps: list[int] = []

    def after_step(self: Method, batch: Batch) -> None:
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(number)

    with monkeypatch.context() as patch, handle_signals():
        patch.setattr(Method, "after_step", after_step)
        with pytest.raises(Interrupted) as caught:
            go_on(tiny, config, stream, tmp_path / "cut")
    assert caught.value.signal == number
    assert len(steps) == 3
    said = pending(tmp_path / "cut")
    assert (said["epoch"], said["step"]) == (1, 1)  # two batches an epoch
    assert "continues at task 1, epoch 2, step 1" in _interrupted(caught.value, tmp_path / "cut").kept
    go_on(tiny, config, stream, tmp_path / "cut")
    same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))
    assert "continues after task 1" in _interrupted(caught.value, tmp_path / "cut").kept
    assert "from the beginning" in _interrupted(KeyboardInterrupt(), tmp_path / "nothing").kept


# --- what is not taken up --------------------------------------------------------------------------


@pytest.fixture
def cut(tiny, tmp_path: Path, often, killed_after, same_bits) -> Iterator[tuple[Path, Callable[[], Model]]]:
    """A run that was cut off in its first task, and what finishes it; in the end it is as it should be."""
    config, stream = tiny.config("seq_ft", train=QUICK), tiny.stream((2, 2), per_class=4)
    killed_after(3)
    with pytest.raises(Killed):
        go_on(tiny, config, stream, tmp_path / "cut")
    killed_after(-1)
    yield tmp_path / "cut", lambda: go_on(tiny, config, stream, tmp_path / "cut")
    go_on(tiny, config, stream, tmp_path / "whole")
    same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))


def test_what_is_damaged_is_left_out_and_said(cut) -> None:
    folder, finish = cut
    path = folder / model_folder.INFLIGHT / checkpoint.FILE
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    notes = finish().history[0].notes
    assert any("was not taken up: its tensors are not what was written" in note for note in notes)


def test_a_description_that_is_damaged_is_left_out_and_said(cut) -> None:
    folder, finish = cut
    path = folder / model_folder.INFLIGHT / checkpoint.FILE
    path.write_bytes(path.read_bytes().replace(b'\\"epoch\\": 1', b'\\"epoch\\": 0'))
    assert any("its description is not what was written" in note for note in finish().history[0].notes)


def said_otherwise(folder: Path, **changes: Any) -> None:
    said = pending(folder)
    place = folder / model_folder.INFLIGHT
    checkpoint.write(place, checkpoint.read_tensors(place, said), said | changes)


def test_another_network_is_left_out_and_said(cut) -> None:
    folder, finish = cut
    said = pending(folder)
    place = folder / model_folder.INFLIGHT
    kept = checkpoint.read_tensors(place, said)
    checkpoint.write(place, kept | {"net.more": torch.zeros(2)}, said)
    assert any("missing or too many, the first is net.more" in n for n in finish().history[0].notes)


def test_other_versions_and_threads_go_on_and_are_noted(cut) -> None:
    folder, finish = cut
    said_otherwise(folder, environment=pending(folder)["environment"] | {"torch": "1.0", "threads": 7})
    (note,) = finish().history[0].notes
    assert "was begun with torch 1.0, now " in note
    assert "threads 7, now 1" in note


def test_a_task_that_is_learned_already_is_forgotten_in_silence(cut) -> None:
    folder, finish = cut
    said_otherwise(folder, task=5)
    assert finish().history[0].notes == []


def test_a_later_format_is_left_out_and_said(cut) -> None:
    folder, finish = cut
    said_otherwise(folder, format=checkpoint.FORMAT + 1)
    assert any("another version of cofima" in note for note in finish().history[0].notes)


def test_another_configuration_is_refused_and_the_task_kept(
    tiny, tmp_path: Path, often, killed_after
) -> None:
    config = tiny.config("seq_ft", train=QUICK)
    killed_after(2)
    with pytest.raises(Killed):
        launch(config, tmp_path)
    before = pending(tmp_path)
    with pytest.raises(CofimaError) as refused:
        launch(tiny.config("seq_ft", train=QUICK | {"lr": 0.9}), tmp_path)
    assert "train.lr: 0.05 before, 0.9 now" in str(refused.value)
    assert f"remove {tmp_path / model_folder.INFLIGHT} to begin anew" in str(refused.value)
    assert pending(tmp_path) == before
    ears = Ears()
    killed_after(-1)
    launch(config, tmp_path, ears)
    assert f"continuing {tmp_path} at task 1, epoch 1, step 2" in ears.heard


def test_undoing_a_task_forgets_what_went_out_from_it(
    tiny, tmp_path: Path, often, killed_after, same_bits
) -> None:
    config, stream = tiny.config("seq_ft", train=QUICK), tiny.stream((2, 2, 2), per_class=4)
    whole = go_on(tiny, config, stream, tmp_path / "whole")
    killed_after(2 * 4 + 1)
    with pytest.raises(Killed):
        go_on(tiny, config, stream, tmp_path / "cut")
    assert pending(tmp_path / "cut")["task"] == 2
    model_folder.undo(tmp_path / "cut")
    killed_after(-1)
    assert scores(go_on(tiny, config, stream, tmp_path / "cut")) == scores(whole)
    same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))


def test_the_environment_says_how_often_or_never(
    tiny, tmp_path: Path, often, killed_after, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stream = tiny.config("seq_ft", train=QUICK), tiny.stream((2,), per_class=4)
    monkeypatch.setenv("COFIMA_INFLIGHT", "often")
    with pytest.raises(CofimaError, match="COFIMA_INFLIGHT = often: expected seconds, or off"):
        go_on(tiny, config, stream, tmp_path)
    monkeypatch.setenv("COFIMA_INFLIGHT", "off")
    killed_after(2)
    go_on(tiny, config, stream, tmp_path)  # nobody kills what nobody writes
    assert not (tmp_path / model_folder.INFLIGHT).exists()


# --- how often -------------------------------------------------------------------------------------

SIZE = 400_000_000  # bytes: four seconds at the speed that a disk is taken to have


class Learner:
    """A method that only counts."""

    def __init__(self) -> None:
        self.seconds, self.notes = 0.0, list[str]()

    def task_state(self) -> dict[str, torch.Tensor]:
        return {}

    def restore_task_state(self, state: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def seconds_so_far(self) -> dict[str, float]:
        return {}

    def add_seconds(self, seconds: dict[str, float]) -> None:
        self.seconds += seconds["inflight"]

    def note(self, text: str) -> None:
        self.notes.append(text)


def simulate(
    monkeypatch: pytest.MonkeyPatch, cost: float, hours: float, fault: Exception | None = None
) -> tuple[list[float], Learner, float]:
    """Train for hours in steps of a second; return the writings, the learner, the largest share."""
    now, written = [0.0], list[float]()

    def write(*_: Any) -> None:
        now[0] += cost
        written.append(now[0])
        if fault is not None:
            raise fault

    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(checkpoint, "write", write)
    state = {"weight": torch.empty(SIZE // 4, device="meta")}
    training: Any = SimpleNamespace(tensors=lambda: state, plain=dict)
    learner = Learner()
    mine: Any = RunCheckpoint(Path(), learner, {"environment": {}})
    mine.start_task(0, "")
    mine.budget.start(SIZE)
    mine.training = training
    most = 0.0
    while now[0] < hours * 3600:
        now[0] += 1
        mine.offer(1)
        most = max(most, learner.seconds / now[0])
    return written, learner, most


@pytest.mark.parametrize("cost", [0.01, 1.0, 4.0])
def test_it_never_takes_more_than_its_share(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    written, learner, most = simulate(monkeypatch, cost, hours=2)
    assert most <= checkpoint.MAX_SHARE
    assert learner.seconds == pytest.approx(cost * len(written))
    gaps = [after - before for before, after in pairwise(written)]
    assert min(gaps) >= checkpoint.EVERY
    assert max(gaps) <= max(checkpoint.EVERY, cost / checkpoint.MAX_SHARE) + cost + 1, (
        "and not less often than that"
    )


def test_a_disk_that_is_slower_than_expected_is_paid_back(monkeypatch: pytest.MonkeyPatch) -> None:
    written, learner, _ = simulate(monkeypatch, cost=40.0, hours=3)
    assert len(written) > 1
    assert written[1] >= 2 * 40 / checkpoint.MAX_SHARE
    assert learner.seconds / (3 * 3600) <= checkpoint.MAX_SHARE


def test_what_cannot_be_written_is_said_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = CofimaError("No space left on device")
    written, learner, most = simulate(monkeypatch, cost=0.1, hours=1, fault=fault)
    assert len(written) > 10
    assert len(learner.notes) == 1
    assert "No space left on device" in learner.notes[0]
    assert most <= checkpoint.MAX_SHARE


# --- the file --------------------------------------------------------------------------------------

TENSORS = {
    "weight": torch.randn(3, 4).t(),  # not contiguous
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.randn(5).bfloat16(),
    "empty": torch.zeros(0, 7),
    "flags": torch.tensor([True, False, True]),
    "chance": torch.Generator().manual_seed(3).get_state(),
}


def test_what_was_written_is_read(tmp_path: Path, same_bits) -> None:
    place = tmp_path / "deep" / "place"
    assert checkpoint.read_description(place) is None
    for number in range(3):
        checkpoint.write(place, TENSORS | {"weight": TENSORS["weight"] + number}, {"number": number})
        said = checkpoint.read_description(place)
        assert said["number"] == number
        same_bits(checkpoint.read_tensors(place, said), TENSORS | {"weight": TENSORS["weight"] + number})
        assert len(list(place.iterdir())) == 1, "what was there before is gone"
    checkpoint.remove(place)
    assert not place.exists()


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_writing_that_fails_leaves_what_was_there(
    fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_bits
) -> None:
    checkpoint.write(tmp_path, TENSORS, {"number": 1})
    whole, calls = MappedFile.put, []

    def put(self, key, first, values):
        calls.append(key)
        if len(calls) == 3:
            raise fault
        whole(self, key, first, values)

    monkeypatch.setattr(MappedFile, "put", put)
    with pytest.raises(CofimaError if isinstance(fault, OSError) else KeyboardInterrupt):
        checkpoint.write(tmp_path, {key: value * 0 for key, value in TENSORS.items()}, {"number": 2})
    said = checkpoint.read_description(tmp_path)
    assert said["number"] == 1
    same_bits(checkpoint.read_tensors(tmp_path, said), TENSORS)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("put", [1, len(TENSORS), len(TENSORS) + 1])
def test_a_process_that_is_killed_while_it_writes_leaves_what_was_there(
    put: int, tmp_path: Path, same_bits
) -> None:
    """It leaves half a file aside, too, which the next writing removes."""
    checkpoint.write(tmp_path, TENSORS, {"number": 1})
    if (pid := os.fork()) == 0:
        calls = []

        def die(*_: Any) -> None:
            calls.append(1)
            if len(calls) == put:
                os._exit(9)

        MappedFile.put = die  # type: ignore[method-assign]
        atomic.sync = die
        checkpoint.write(tmp_path, TENSORS, {"number": 2})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert len(list(tmp_path.iterdir())) == 2
    said = checkpoint.read_description(tmp_path)
    assert said["number"] == 1
    same_bits(checkpoint.read_tensors(tmp_path, said), TENSORS)
    checkpoint.write(tmp_path, TENSORS, {"number": 3})
    assert checkpoint.read_description(tmp_path)["number"] == 3
    assert len(list(tmp_path.iterdir())) == 1


def test_damage_is_found(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, TENSORS, {"number": 1})
    said = checkpoint.read_description(tmp_path)
    file = tmp_path / checkpoint.FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="not what was written"):
        checkpoint.read_tensors(tmp_path, said)
    for damaged in (whole[:-1], whole[:50], b"", whole[:8] + b"?" + whole[9:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot be read"):
            checkpoint.read_description(tmp_path)
        with pytest.raises(ValueError, match="cannot be read"):
            checkpoint.read_tensors(tmp_path, said)
    for damaged in (whole.replace(b"number", b"Number"), whole.replace(b"description", b"Description")):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="its description is not what was written"):
            checkpoint.read_description(tmp_path)
