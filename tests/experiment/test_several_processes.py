"""Several processes learn what one learns: on the CPU, in double precision.

Two are forked with the variables that torchrun sets, which saves the import of torch in three processes; the
slow tests begin with torchrun itself.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cofima import methods
from cofima.store import model_folder
from cofima.store.generation import CURRENT
from forked import Forked

HERE = Path(__file__).parent
SHARED = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
MAIN = ["coma", "cofima", "slca", "slca_pp", "ranpac"]
VARIANTS = ["cofima sampled", "cofima authors", "coma auto", "coma resnet", "l2p vote", "ranpac none"]
VARIANTS += ["slca balanced", "coma lora", "ema lora resnet", "coma lda", "slca ridge", "ema drift"]
RUN = [
    "-m",
    "cofima",
    "run",
    "demo.yaml",
    "dataset=blobs",
    "method=slca",
    "options.align.epochs=1",
    "device=cpu",
]


def start(count: int, *arguments: str, restarts: int = 0) -> "subprocess.Popen[str] | Forked":
    """Start one process, or torchrun with several."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if count == 1:
        return Forked(*arguments, env=environment)
    several = [*SHARED, f"--nproc-per-node={count}", f"--max-restarts={restarts}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*several, *arguments], env=environment, **pipes)


def finish(process: "subprocess.Popen[str] | Forked") -> str:
    """Wait until all went well, and return what was printed."""
    said, complained = process.communicate(timeout=900)
    assert process.returncode == 0, complained
    return said


def start_forked(count: int, *arguments: str) -> list[Forked]:
    """Start several processes as torchrun does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    shared = os.environ | address | {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    ranks = [{"RANK": str(number), "LOCAL_RANK": str(number)} for number in range(count)]
    return [Forked(*arguments, env=shared | rank) for rank in ranks]


def learn(folder: Path, count: int, cases: Sequence[str], *, torchrun: bool) -> None:
    """Learn the cases with one process, and with several, side by side."""
    started: list[subprocess.Popen[str] | Forked] = []
    for number in (1, count):
        (folder / str(number)).mkdir()
        words = [str(HERE / "learn_in_processes.py"), str(folder / str(number)), *cases]
        started += [start(number, *words)] if number == 1 or torchrun else start_forked(number, *words)
    for process in started:
        finish(process)


def same(folder: Path, case: str, count: int) -> None:
    """Compare what each of several processes has with what one learned, to eleven digits."""
    one = load_file(folder / "1" / f"{case}.0.safetensors")
    for number in range(count):
        several = load_file(folder / str(count) / f"{case}.{number}.safetensors")
        assert several.keys() == one.keys()
        for key, value in one.items():
            if not value.is_floating_point():
                assert torch.equal(several[key], value), key
            elif value.numel():
                error = (several[key] - value).abs().max()
                assert error <= 1e-11 * value.abs().max(), f"{key} differs by {error}"
    rows, others = (json.loads((folder / name / f"{case}.0.json").read_text()) for name in ("1", str(count)))
    for row, other in zip(rows, others, strict=True):
        assert (row["accuracy"], row["top5"]) == (other["accuracy"], other["top5"])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what one process and two learned."""
    folder = tmp_path_factory.mktemp("both")
    learn(folder, 2, MAIN, torchrun=False)
    return folder


@pytest.mark.parametrize("case", MAIN)
def test_two_processes_learn_what_one_learns(both: Path, case: str) -> None:
    same(both, case, 2)
    kept = load_file(both / "2" / f"{case}.0.safetensors")
    assert case != "cofima" or any(key.startswith("state.fisher.") for key in kept)
    assert case == "ranpac" or "state.gaussians.rows" in kept
    assert kept["logits"].dtype == torch.float64


def test_the_work_is_shared(both: Path) -> None:
    """Each of two processes passes about half of the images through the backbone."""
    one, *two = (
        json.loads((both / name).read_text())[-1]["passed"]
        for name in ("1/cofima.0.json", "2/cofima.0.json", "2/cofima.1.json")
    )
    assert one <= sum(two) < 1.1 * one  # each looks twice at two images before it trusts the fast Fisher
    assert max(two) < 0.65 * one  # of five images one takes two, the other three


def test_processes_that_see_different_things_stop(both: Path) -> None:
    for number in (0, 1):
        said = (both / "2" / f"refused.{number}.txt").read_text()
        assert "the number: process 1 does not see what process 0 sees" in said
    assert not (both / "1" / "refused.0.txt").exists()


@pytest.mark.slow
def test_four_processes_learn_what_one_learns_whatever_the_method(tmp_path: Path) -> None:
    """A method that is not here must say why it is for one process only."""
    several = [name for name in methods.names() if not methods.find(name).single_process_only]
    learn(tmp_path, 4, [*several, *VARIANTS], torchrun=True)
    for case in (*several, *VARIANTS):
        same(tmp_path, case, 4)


def children(parent: int) -> dict[int, int]:
    """Return the processes that torchrun started, by their number among them."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            said = (path / "environ").read_bytes().split(b"\0")
            above = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        rank = [int(item[5:]) for item in said if item.startswith(b"RANK=")]
        if above == parent and rank:
            found[rank[0]] = int(path.name)
    return found


def kill_one(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Kill the second of two processes in the middle of the second task."""
    while not (folder / CURRENT).is_file():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(children(process.pid)[1], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
def test_a_killed_process_ends_the_job_and_the_same_command_continues(tmp_path: Path, same_bits) -> None:
    arguments = [*RUN, "train.epochs=6", "train.batch_size=10", "--out"]
    cut, again, whole, one = (tmp_path / name for name in ("cut", "again", "whole", "one"))
    process = start(2, *arguments, str(cut))
    kill_one(process, cut)
    process.communicate(timeout=120)  # nobody waits for the dead one
    assert process.returncode != 0
    assert model_folder.current(cut).name == "0001"
    said = finish(start(2, *arguments, str(cut)))
    assert said.count("continuing") == 1  # one process speaks
    process = start(2, *arguments, str(again), restarts=1)
    kill_one(process, again)
    assert "continuing" in finish(process)  # torchrun itself gave the command again
    finish(start(2, *arguments, str(whole)))
    found = [model_folder.read(folder) for folder in (cut, again, whole)]
    first, second, third = (generation.weights() | generation.state() for generation in found)
    same_bits(first, third)
    same_bits(second, third)
    rows = model_folder.read_history(cut)
    assert [row.processes for row in rows] == [2, 2, 2]
    finish(start(1, *arguments, str(one)))
    assert [row.accuracy for row in model_folder.read_history(one)] == [row.accuracy for row in rows]
    assert model_folder.read_history(one)[0].processes == 1
    assert "done" in finish(start(2, *arguments, str(cut)))


@pytest.mark.slow
def test_a_mistake_is_said_before_any_work(tmp_path: Path) -> None:
    process = start(2, *RUN, "train.batch_size=1", "--out", str(tmp_path / "run"))
    _, complained = process.communicate(timeout=300)
    assert process.returncode != 0
    assert complained.count("cofima: a run in 2 processes has 1 problem") == 1
    assert "train.batch_size = 1: smaller than the number of processes" in complained
    assert not (tmp_path / "run").exists()
