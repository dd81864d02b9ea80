"""Launching of runs: resumed after any interruption, refused for another configuration."""

import json
import signal
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.core.seeds import Seeds
from cofima.data.sources.in_memory import blobs
from cofima.experiment.launch import launch
from cofima.experiment.stream import load_stream
from cofima.methods.base import Method
from cofima.models.backbone import create
from cofima.store import model_folder
from cofima.store.model import load_model
from forked import Forked

TESTS = Path(__file__).parents[1]


class Ears(Progress):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def say(self, message: str) -> None:
        self.heard.append(message)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def quick(tiny, method: str = "seq_ft", **more):
    return tiny.config(method, train={"epochs": 1} | more.pop("train", {}), **more)


# --- killed ----------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import tiny
import torch
torch.set_num_threads(1)
from cofima.experiment.launch import launch
from cofima.core.progress import Progress

class Loud(Progress):
    stage_now = ""
    def stage(self, label):
        self.stage_now = label
        return super().stage(label)
    def track(self, items, total, label):
        for n, item in enumerate(items):
            print(f"{self.stage_now} | {label} | {n}", flush=True)
            yield item

launch(tiny.tiny_config("cofima", train={"epochs": 2}), Path(sys.argv[2]), Loud())
print("finished", flush=True)
"""


@pytest.mark.parametrize("moment", ["task 2/3 | epoch 1/2", "task 3/3 | fisher"])
def test_a_killed_process_is_continued_to_the_same_bits(moment: str, tiny, tmp_path: Path, same_bits) -> None:
    """kill -9 in the middle of training, and in the middle of what comes after it."""
    (tmp_path / "child.py").write_text(CHILD)
    process = Forked(tmp_path / "child.py", TESTS, tmp_path / "cut")
    for line in process.stdout:
        if moment in line:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGKILL
    done = int(moment[5]) - 1
    assert len(load_model(tmp_path / "cut").tasks) == done
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = tiny.config("cofima", train={"epochs": 2})
        whole, cut = launch(config, tmp_path / "whole"), launch(config, tmp_path / "cut")
    finally:
        torch.set_num_threads(threads)
    same_bits(cut.weights(), whole.weights())
    same_bits(cut.method.state(), whole.method.state())
    assert [row.accuracy for row in cut.history] == [row.accuracy for row in whole.history]


def test_a_run_stopped_by_an_exception_inside_a_task_goes_on(
    tiny, tmp_path: Path, stop_at, same_bits
) -> None:
    config = quick(tiny, "coma", options={"lam": "auto"})
    whole = launch(config, tmp_path / "whole")
    stopped = stop_at(2, step=2)
    with pytest.raises(stopped):
        launch(config, tmp_path / "cut")
    assert model_folder.current(tmp_path / "cut").name == "0002"
    ears = Ears()
    cut = launch(config, tmp_path / "cut", ears)
    assert any("continuing" in line and "after task 2 of 3" in line for line in ears.heard)
    same_bits(cut.weights(), whole.weights())
    same_bits(cut.method.state(), whole.method.state())


# --- done, changed, diverged -----------------------------------------------------------------------


def test_a_finished_run_says_done_and_writes_nothing(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launch(quick(tiny), tmp_path)
    before = content(tmp_path)
    ears = Ears()
    monkeypatch.setattr(Method, "learn", lambda *_: pytest.fail("learned again"))
    again = launch(quick(tiny), tmp_path, ears)
    assert any(line.startswith("done") and "3 tasks" in line for line in ears.heard)
    assert content(tmp_path) == before
    assert again.history == first.history


def test_a_changed_configuration_is_refused_with_the_difference(tiny, tmp_path: Path) -> None:
    launch(quick(tiny, "coma"), tmp_path)
    before = content(tmp_path)
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    changed = quick(tiny, "coma", seed=9, train={"lr": 0.5}, options={"lam": 0.7})
    with pytest.raises(CofimaError) as caught:
        launch(changed, tmp_path)
    said = str(caught.value)
    for line in (
        "seed: 3 before, 9 now",
        "train.lr: 0.05 before, 0.5 now",
        "options.lam: 0.4 before, 0.7 now",
    ):
        assert line in said
    assert "kept" in said
    assert content(tmp_path) == before
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == stamps


def test_another_method_is_a_changed_configuration(tiny, tmp_path: Path) -> None:
    launch(quick(tiny, "slca"), tmp_path)
    with pytest.raises(CofimaError, match="method: slca before, seq_ft now"):
        launch(quick(tiny, "seq_ft"), tmp_path)


def test_what_does_not_change_the_result_may_change(tiny, tmp_path: Path) -> None:
    launch(quick(tiny), tmp_path)
    again = launch(quick(tiny, keep_checkpoints=True, device="auto"), tmp_path)
    assert len(again.tasks) == 3


def test_a_run_with_groups_of_classes_is_continued(tiny, tmp_path: Path, stop_at, same_bits) -> None:
    config = quick(tiny, "slca", stream={"groups": [["blob 3", 0, 1], [5], [2, 4]]})
    whole = launch(config, tmp_path / "whole")
    assert whole.tasks == [("blob 3", "blob 0", "blob 1"), ("blob 5",), ("blob 2", "blob 4")]
    with pytest.raises(stop_at(1, step=1)):
        launch(config, tmp_path / "cut")
    same_bits(launch(config, tmp_path / "cut").weights(), whole.weights())


def test_other_images_under_the_same_name_are_refused(
    tiny, tmp_path: Path, stop_at, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(stop_at(1, step=1)):
        launch(quick(tiny), tmp_path)
    before = content(tmp_path)
    others = "cofima.data.sources.in_memory.blobs"
    monkeypatch.setattr(others, lambda side, seed: blobs(side=side, seed=seed + 1))
    with pytest.raises(CofimaError, match="are not those that"):
        launch(quick(tiny), tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize(("method", "network"), [("seq_ft", "resnet_test"), ("cofima", "vit_test")])
def test_a_diverged_task_keeps_the_state_before_on_disk(
    network: str, method: str, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick(tiny, method, network=network)
    loss = Method.loss

    def poisoned(self: Method, batch):
        value = loss(self, batch)
        return value * float("nan") if self.task.index == 2 else value

    with monkeypatch.context() as patch:
        patch.setattr(Method, "loss", poisoned)
        with pytest.raises(CofimaError, match="task 3, epoch 1, step 1"):
            launch(config, tmp_path)
    assert model_folder.current(tmp_path).name == "0002"
    model = load_model(tmp_path)
    assert len(model.tasks) == 2
    assert all(torch.isfinite(v).all() for v in model.weights().values())
    assert len(launch(config, tmp_path).tasks) == 3


def test_an_absurd_rate_writes_nothing(tiny, tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match=r"smaller train\.lr"):
        launch(quick(tiny, train={"lr": 1e30, "backbone_lr_scale": 1}), tmp_path / "model")
    assert not (tmp_path / "model").exists()


# --- before any work -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"device": "cuda:9"}, "device = cuda:9"),
        ({"stream": {"base_classes": 7}}, "only 6 classes"),
        ({"stream": {"groups": [[0], [0]]}}, "already in group 1"),
        ({"stream": {"groups": [["blob 9"]]}}, "unknown class 'blob 9'"),
        ({"train": {"precision": "bf16"}}, "needs a GPU"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_and_nothing_is_written(
    more: dict, said: str, tiny, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("these refusals are of machines without a GPU")
    with pytest.raises(CofimaError, match=said):
        launch(quick(tiny, **more), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_classes_arrive_in_the_published_order_unless_told_otherwise(tiny) -> None:
    _, facts = create("vit_test", tiny.config().model)
    for more, seed in (({"seed": 1993}, 1993), ({"stream": {"order_seed": 7}}, 7)):
        stream = load_stream(tiny.config(**more), facts)
        order = np.random.RandomState(seed).permutation(6)
        assert stream.class_names == tuple(f"blob {c}" for c in order)
    stream = load_stream(tiny.config(stream={"order_seed": -1}), facts)
    assert stream.class_names == tuple(f"blob {c}" for c in range(6))


def test_held_out_scores_never_touch_the_test_images(tiny, tmp_path: Path) -> None:
    _, facts = create("vit_test", tiny.config().model)
    plain, held = (load_stream(tiny.config(val_fraction=share), facts) for share in (0.0, 0.25))
    tested = {int(r) for task in plain for r in task.test.rows}
    for task in held:
        assert tested.isdisjoint(task.train.rows.tolist())
        assert tested.isdisjoint(task.test.rows.tolist())
    model = launch(quick(tiny, val_fraction=0.25), tmp_path)
    assert model.history[0].sizes == [10]


def test_a_run_leaves_global_randomness_alone(tiny, tmp_path: Path) -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    launch(quick(tiny, "cofima"), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_relative_folders_and_text_paths_work(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launch(quick(tiny, "joint"), Path("a/b"))
    assert json.loads((tmp_path / "a/b/0001/config.json").read_text())["planned_tasks"] == 1
    assert len(load_model("a/b").tasks) == 1


# --- seeds -----------------------------------------------------------------------------------------


def test_streams_of_numbers_are_independent_and_depend_on_their_name_alone() -> None:
    seeds = Seeds(5)
    places = [
        ("loader", 0, 0),
        ("loader", 0, 1),
        ("loader", 1, 0),
        ("augment", 0, 0),
        ("loader",),
        ("loader", 0),
    ]
    numbers = {seeds.number(name, *place) for name, *place in places}
    assert len(numbers) == len(places)
    assert all(0 <= n < 2**63 for n in numbers)
    assert Seeds(5).number("loader", 0, 0) == seeds.number("loader", 0, 0)
    assert Seeds(6).number("loader", 0, 0) not in numbers
    a, b = (torch.rand(3, generator=seeds.generator("x", 1)) for _ in range(2))
    assert torch.equal(a, b)


def test_a_stream_of_numbers_never_changes() -> None:
    """Published runs could not be repeated otherwise."""
    expected = int.from_bytes(sha256(b"1993/head/0").digest()[:8], "little") >> 1
    assert Seeds(1993).number("head", 0) == expected


def test_time_is_told_in_seconds(tiny, tmp_path: Path) -> None:
    start = time.perf_counter()
    model = launch(quick(tiny, "cofima"), tmp_path)
    spent = time.perf_counter() - start
    told = [row.seconds for row in model.history]
    assert 0 < sum(row["total"] for row in told) < spent
    assert all({"train", "fisher", "statistics"} <= row.keys() for row in told)
