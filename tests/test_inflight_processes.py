"""Real processes, really killed; real disks, really full."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cofima import methods, store
from cofima.errors import CofimaError
from cofima.experiment.inflight import begun, place
from cofima.experiment.launch import launch
from cofima.progress import Progress
from cofima.training.journal import Journal

CONFTEST = Path(__file__).parent / "conftest.py"
TRAIN = {"epochs": 3, "batch": 4}
CHILD = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("tiny_conftest", sys.argv[1])
tiny = sys.modules["tiny_conftest"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
from cofima.experiment.launch import launch
from cofima.training.journal import Journal, Kept

whole = Kept.offer
def offer(self, step):
    print("step", flush=True)
    whole(self, step)
Kept.offer = offer
Journal.due = lambda self: True
launch(tiny.tiny_config(sys.argv[3], train={"epochs": 3, "batch": 4}), Path(sys.argv[2]))
print("finished", flush=True)
"""


def child(name: str, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, str(CONFTEST), str(folder), name]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def kill_some_time_after(steps: int, name: str, folder: Path, chance: random.Random) -> bool:
    """Let a process learn, and kill it at any moment after so many steps; false if it was quicker."""
    process = child(name, folder)
    assert process.stdout is not None
    for line in process.stdout:
        steps -= line == "step\n"
        if steps == 0 or line == "finished\n":
            break
    time.sleep(chance.random() * 0.02)  # while it computes, or while it writes
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    return process.wait(timeout=60) == -signal.SIGKILL


def tensors(folder: Path) -> dict[str, Tensor]:
    generation = store.current(folder)
    weights = {f"model.{key}": value for key, value in load_file(generation / store.WEIGHTS).items()}
    return weights | {f"state.{key}": value for key, value in load_file(generation / store.STATE).items()}


def killed_run_is_the_same(name: str, kills: int, tiny, tmp_path: Path, same_bits) -> None:
    config, chance = tiny.config(name, train=TRAIN), random.Random(name)
    whole = launch(config, tmp_path / "whole")
    for _ in range(kills):
        assert kill_some_time_after(chance.randint(4, 40), name, tmp_path / "cut", chance)
    cut = launch(config, tmp_path / "cut")
    same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))
    assert [row["accuracy"] for row in cut.history] == [row["accuracy"] for row in whole.history]
    images = torch.arange(4 * 3 * 16 * 16, dtype=torch.int64).remainder(256).view(4, 3, 16, 16).byte()
    assert torch.equal(cut.logits(images), whole.logits(images))


def test_killed_by_the_system_in_the_middle_of_tasks(tiny, tmp_path: Path, same_bits) -> None:
    killed_run_is_the_same("cofima", 2, tiny, tmp_path, same_bits)


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.names())
def test_every_method_survives_real_kills(name: str, tiny, tmp_path: Path, same_bits) -> None:
    if name == "prototype":
        pytest.skip("it trains nothing: there is no middle of a task")
    killed_run_is_the_same(name, 1 if name in ("joint", "ranpac") else 3, tiny, tmp_path, same_bits)


# --- signals ---------------------------------------------------------------------------------------


def test_a_signal_is_answered_with_where_to_go_on(tmp_path: Path) -> None:
    words = ["run", "demo.yaml", "dataset=blobs", "train.epochs=500", "--out", "long"]
    running = subprocess.Popen(
        [sys.executable, "-m", "cofima", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert "task 1" in running.stdout.readline()
    time.sleep(1)
    running.send_signal(signal.SIGTERM)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 128 + signal.SIGTERM
    said = begun(tmp_path / "long")
    assert stderr == f"cofima: interrupted; the same command continues at {place(said)}\n"
    assert re.fullmatch(r"task 1, epoch \d+, step \d+", place(said))
    assert not (tmp_path / "long" / ".lock").exists()


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
    monkeypatch.setattr(Journal, "due", lambda self: True)
    fill = FillDisk(small_disk, task=2)
    with pytest.raises(CofimaError, match=r"could not be written \(.*No space left.*earlier states are kept"):
        launch(config, small_disk / "run", fill)
    noted = [line for line in fill.heard if "in the middle of this task could not be written" in line]
    assert len(noted) == 1, "said once, and the training went on"
    assert "No space left on device" in noted[0]
    kept = store.load(small_disk / "run")
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
    store.save(model, folder)
    store.save(model, folder)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for refused in (
        lambda: launch(config, folder),
        lambda: launch(config, small_disk / "new"),
        lambda: store.save(model, folder),
        lambda: store.undo(folder),
    ):
        with pytest.raises(CofimaError, match=r"cannot be written"):
            refused()
    assert store.load(folder).classes == model.classes
