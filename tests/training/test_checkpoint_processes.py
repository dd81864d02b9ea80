"""Checkpoints with real processes that are killed, and real disks that are full."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.experiment.launch import launch, pending
from cofima.store import model_folder
from cofima.store.model import load_model, save_model
from cofima.training.checkpoint import Budget, describe
from forked import Forked

TESTS = Path(__file__).parents[1]
TRAIN = {"epochs": 3, "batch_size": 4}

# Learns each method once undisturbed ("whole"), and once in processes that are killed ("cut"). A process
# tells each of its steps, and is killed at a random moment after a random number of them: while it
# computes, or while it writes. It has leave for a few steps more and then waits for its end, so that it
# cannot be done before a killer that the system let wait. The processes are forked, so that torch is
# imported once.
KILLER = """
import os, random, signal, sys, time, traceback
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import tiny
from cofima.experiment.launch import launch
from cofima.training.checkpoint import Budget, RunCheckpoint

def process(name, folder, steps=0, more=0):
    ours, theirs = os.pipe()
    leave, given = os.pipe()
    os.write(given, bytes(steps + more))
    pid = os.fork()
    if pid == 0:
        os.close(given)
        try:
            whole = RunCheckpoint.offer
            def offer(self, step):
                os.write(theirs, b".")
                if steps:
                    os.read(leave, 1)
                whole(self, step)
            RunCheckpoint.offer = offer
            if steps:
                Budget.due = lambda self: True
            few = {"max_train_per_class": 8, "max_test_per_class": 4}
            how = {"train": {"epochs": 3, "batch_size": 4}, "data": few}
            launch(tiny.tiny_config(name, **how), folder)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(theirs)
    taken = 0
    while os.read(ours, 1):
        taken += 1
        if taken == steps:
            time.sleep(0.03 * chance.random())
            os.kill(pid, signal.SIGKILL)
    for end in (ours, leave, given):
        os.close(end)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), taken

for name in sys.argv[4:]:
    chance, killed = random.Random(name), 0
    code, taken = process(name, Path(sys.argv[2]) / name / "whole")
    assert code == 0
    for _ in range(int(sys.argv[3])):
        steps = max(1, min(chance.randint(3, 12), taken - 1))
        more = max(0, min(4, taken - 1 - steps))  # so that the first process is killed for certain
        code, _ = process(name, Path(sys.argv[2]) / name / "cut", steps, more)
        killed += code == -signal.SIGKILL
    code, _ = process(name, Path(sys.argv[2]) / name / "cut")
    assert code == 0
    print(name, killed, taken, flush=True)
"""


def kill(names: list[str], times: int, folder: Path) -> dict[str, tuple[int, int]]:
    """Let every method be killed so many times; return how often it was, and its steps when undisturbed."""
    (folder / "killer.py").write_text(KILLER)
    killer = Forked(folder / "killer.py", TESTS, folder, str(times), *names)
    said, complained = killer.communicate(timeout=3600)
    assert killer.returncode == 0, complained
    lines = (line.split() for line in said.splitlines())
    return {name: (int(killed), int(taken)) for name, killed, taken in lines}


def tensors(folder: Path) -> dict[str, Tensor]:
    generation = model_folder.read(folder)
    weights = {f"model.{key}": value for key, value in generation.weights().items()}
    return weights | {f"state.{key}": value for key, value in generation.state().items()}


def killed_runs_are_the_same(names: list[str], folder: Path, same_bits) -> None:
    images = torch.arange(4 * 3 * 16 * 16, dtype=torch.int64).remainder(256).view(4, 3, 16, 16).byte()
    for name in names:
        same_bits(tensors(folder / name / "cut"), tensors(folder / name / "whole"))
        cut, whole = (load_model(folder / name / which) for which in ("cut", "whole"))
        assert [row.accuracy for row in cut.history] == [row.accuracy for row in whole.history]
        assert torch.equal(cut.logits(images), whole.logits(images))
        assert not (folder / name / "cut" / model_folder.INFLIGHT).exists()


def test_killed_by_the_system_in_the_middle_of_tasks(tmp_path: Path, same_bits) -> None:
    names = ["cofima", "der_pp"]
    killed = kill(names, 2, tmp_path)
    assert all(killed[name][0] >= 1 for name in names), killed
    killed_runs_are_the_same(names, tmp_path, same_bits)


@pytest.mark.slow
def test_every_method_survives_real_kills(tmp_path: Path, same_bits) -> None:
    killed = kill(methods.names(), 6, tmp_path)
    assert set(killed) == set(methods.names())
    solved = {name for name, (_, taken) in killed.items() if taken == 0}
    assert solved == {"prototype", "slda", "fecam"}, "they train nothing: there is no middle of a task"
    assert all(count >= 1 for name, (count, _) in killed.items() if name not in solved), killed
    killed_runs_are_the_same(methods.names(), tmp_path, same_bits)


# --- signals ---------------------------------------------------------------------------------------


def test_a_signal_is_answered_with_where_to_go_on(tmp_path: Path) -> None:
    words = ["run", "demo.yaml", "dataset=blobs", "train.epochs=500", "train.batch_size=8", "--out", "long"]
    words += ["backbone=test_vit", "model.pretrained=false", "model.img_size=32"]
    running = Forked("-m", "cofima", *words, cwd=tmp_path, env=os.environ | {"COFIMA_INFLIGHT": "0"})
    until = time.monotonic() + 300
    while not pending(tmp_path / "long") and time.monotonic() < until:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    _, stderr = running.communicate()
    assert running.returncode == 128 + signal.SIGTERM
    said = pending(tmp_path / "long")
    assert stderr == f"cofima: interrupted; the same command continues at {describe(said)}\n"
    assert re.fullmatch(r"task 1, epoch \d+, step \d+", describe(said))
    assert not (tmp_path / "long" / ".lock.holder").exists()


# --- disks -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"a disk cannot be mounted here ({made.stderr.strip() or made.returncode})")
    yield place
    subprocess.run(["umount", str(place)], check=True)


class FillDisk(Progress):
    """Take all room that is left when a task begins."""

    def __init__(self, disk: Path, task: int) -> None:
        self.disk, self.task = disk, task
        self.heard: list[str] = []

    def stage(self, label: str):
        if f"task {self.task}/" in label:
            with (self.disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
        return super().stage(label)

    def say(self, message: str) -> None:
        self.heard.append(message)


def test_a_full_disk_costs_nothing_that_was_there(
    small_disk: Path, tiny, tmp_path: Path, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config("coma", train=TRAIN)
    launch(config, tmp_path / "whole")
    monkeypatch.setattr(Budget, "due", lambda self: True)
    fill = FillDisk(small_disk, task=2)
    with pytest.raises(CofimaError, match=r"could not be written \(.*No space left"):
        launch(config, small_disk / "run", fill)
    noted = [line for line in fill.heard if "in the middle of this task could not be written" in line]
    assert len(noted) == 1, "said once, and the training went on"
    assert "No space left on device" in noted[0]
    kept = load_model(small_disk / "run")
    assert len(kept.tasks) == 1
    assert kept.logits(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).shape == (2, len(kept.classes))
    (small_disk / "ballast").unlink()
    launch(config, small_disk / "run")
    same_bits(tensors(small_disk / "run"), tensors(tmp_path / "whole"))


def test_a_read_only_disk_is_refused_and_still_read(small_disk: Path, tiny) -> None:
    stream, folder = tiny.stream((2, 2), per_class=4), small_disk / "run"
    config = tiny.config(train={"epochs": 1})
    model = tiny.model(config, stream)
    model.method.learn(stream[0])
    model.tasks.append(stream[0].names)
    save_model(model, folder)
    save_model(model, folder)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for refused in (
        lambda: launch(config, folder),
        lambda: launch(config, small_disk / "new"),
        lambda: save_model(model, folder),
        lambda: model_folder.undo(folder),
    ):
        with pytest.raises(CofimaError, match=r"cannot be written"):
            refused()
    assert load_model(folder).classes == model.classes
