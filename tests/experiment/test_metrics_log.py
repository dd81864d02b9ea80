"""metrics.jsonl: every epoch and task once, whatever happens to the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cofima.core.errors import CofimaError, CofimaWarning
from cofima.experiment import metrics_log
from cofima.experiment.launch import launch
from cofima.experiment.metrics_log import METRICS, MetricsLog
from cofima.store.history import HistoryRow

ROW = HistoryRow(kind="task", task=1, classes=["a"], accuracy=[80.0], sizes=[10])


def keys(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(line["kind"], line["task"], line.get("epoch")) for line in lines]


def epoch(book: MetricsLog, task: int, number: int, *losses: float) -> None:
    book.epoch(task, number, torch.tensor(losses or (1.0,)), [0.1, 0.2])


def test_a_run_writes_down_every_epoch_and_task(tmp_path: Path, tiny: Any) -> None:
    config = tiny.config("seq_ft", train={"epochs": 3, "milestones": [2], "batch_size": 16})
    model = tiny.run(tmp_path, config, tiny.stream((2, 2), per_class=12))
    lines = metrics_log.read(tmp_path)
    assert keys(lines) == [
        (kind, task, number)
        for task in (1, 2)
        for kind, number in [("epoch", 1), ("epoch", 2), ("epoch", 3), ("task", None)]
    ]
    assert [line["step"] for line in lines] == [2, 4, 6, 6, 8, 10, 12, 12]  # 24 images, 16 a step
    assert [line["lr"] for line in lines[:3]] == pytest.approx([0.05, 0.05, 0.005])
    assert [line["backbone_lr"] for line in lines[:3]] == pytest.approx([0.01, 0.01, 0.001])
    assert lines[0]["time"] <= lines[-1]["time"]
    for line, row in zip([line for line in lines if line["kind"] == "task"], model.history, strict=True):
        assert row.model_dump(mode="json").items() <= line.items()
        right = sum(a * n for a, n in zip(row.accuracy, row.sizes, strict=True)) / sum(row.sizes)
        assert line["seen"] == right


def test_the_loss_is_the_mean_over_the_steps(tmp_path: Path, tiny: Any, monkeypatch: Any) -> None:
    from cofima.methods import Batch, Method

    plain, seen = Method.loss, []

    def loss(self: Method, batch: Batch) -> torch.Tensor:
        value = plain(self, batch)
        seen.append(float(value.detach()))
        return value

    monkeypatch.setattr(Method, "loss", loss)
    tiny.run(tmp_path, tiny.config(train={"epochs": 1, "batch_size": 16}), tiny.stream((2,), per_class=12))
    assert metrics_log.read(tmp_path)[0]["loss"] == pytest.approx(sum(seen) / 2)


def test_a_run_that_was_cut_off_has_no_line_twice(tmp_path: Path, tiny: Any, stop_at: Any) -> None:
    config = tiny.config("seq_ft", stream={"base_classes": 2, "increment": 2})
    launch(config, tmp_path / "whole")
    with pytest.raises(stop_at(1, step=4)):  # in the second task, after an epoch or more
        launch(config, tmp_path / "cut")
    cut = metrics_log.read(tmp_path / "cut")
    assert [k for k in keys(cut) if k[1] == 2]
    launch(config, tmp_path / "cut")
    whole, again = metrics_log.read(tmp_path / "whole"), metrics_log.read(tmp_path / "cut")
    assert keys(again) == keys(whole)
    assert [line.get("loss") for line in again] == [line.get("loss") for line in whole]
    assert [line["step"] for line in again] == [line["step"] for line in whole]


def test_epochs_before_the_one_that_goes_on_are_kept(tmp_path: Path) -> None:
    book = MetricsLog(tmp_path, [])
    for number in range(4):
        epoch(book, 0, number, 1.0, 2.0)
    again = MetricsLog(tmp_path, [])
    epoch(again, 0, 2, 3.0, 4.0)
    lines = metrics_log.read(tmp_path)
    assert keys(lines) == [("epoch", 1, 1), ("epoch", 1, 2), ("epoch", 1, 3)]
    assert [line["loss"] for line in lines] == [1.5, 1.5, 3.5]
    assert [line["step"] for line in lines] == [2, 4, 6]


def test_a_method_that_trains_twice_in_a_task_counts_on(tmp_path: Path) -> None:
    book = MetricsLog(tmp_path, [])
    book.begin()
    for number in (0, 1, 0, 1, 2):
        epoch(book, 0, number)
    book.task(ROW)
    book.begin()
    epoch(book, 1, 0)
    assert [line.get("epoch") for line in metrics_log.read(tmp_path)] == [1, 2, 3, 4, 5, None, 1]


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    epoch(MetricsLog(tmp_path, []), 0, 0)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"kind": "epoch", "ta')
    assert len(metrics_log.read(tmp_path)) == 1
    epoch(MetricsLog(tmp_path, []), 0, 1)
    assert keys(metrics_log.read(tmp_path)) == [("epoch", 1, 1), ("epoch", 1, 2)]


def test_tasks_of_before_are_written_from_the_history(tmp_path: Path) -> None:
    second = HistoryRow(kind="task", task=2, classes=["b"], accuracy=[70.0, 90.0], sizes=[10, 30])
    MetricsLog(tmp_path, [ROW, second])
    lines = metrics_log.read(tmp_path)
    assert [line["seen"] for line in lines] == [80.0, 85.0]
    MetricsLog(tmp_path, [ROW, second])
    assert metrics_log.read(tmp_path) == lines


def test_tasks_that_were_undone_are_dropped(tmp_path: Path) -> None:
    book = MetricsLog(tmp_path, [])
    for task in (1, 2):
        epoch(book, task - 1, 0)
        book.task(ROW.model_copy(update={"task": task}))
        book.begin()
    epoch(MetricsLog(tmp_path, [ROW]), 1, 0)
    assert keys(metrics_log.read(tmp_path)) == [("epoch", 1, 1), ("task", 1, None), ("epoch", 2, 1)]


def test_listeners_hear_every_line_once(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path, [])
    epoch(first, 0, 0)
    first.task(ROW)
    first.begin()
    epoch(first, 1, 0)
    epoch(first, 1, 1)
    heard: list[dict[str, Any]] = []
    book = MetricsLog(tmp_path, [ROW], [heard.append])
    assert keys(heard) == [("epoch", 1, 1), ("task", 1, None)]
    epoch(book, 1, 1)
    assert heard == metrics_log.read(tmp_path)


def test_a_listener_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    def broken(line: dict[str, Any]) -> None:
        raise ConnectionError("no server")

    book = MetricsLog(tmp_path, [], [broken])
    with pytest.warns(CofimaWarning, match=r"left out; .*metrics\.jsonl has all it missed: no server"):
        epoch(book, 0, 0)
    epoch(book, 0, 1)
    assert len(metrics_log.read(tmp_path)) == 2


def test_only_one_of_several_processes_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cofima.core.distributed.rank", lambda: 1)
    epoch(MetricsLog(tmp_path, []), 0, 0)
    assert not (tmp_path / METRICS).exists()


@pytest.mark.parametrize("wrong", ["task", "step", "time", "kind", "accuracy", "seconds", ""])
def test_what_is_no_journal_is_said(wrong: str, tmp_path: Path) -> None:
    """A line of any author: all that is relied on is checked."""
    line = {"kind": "task", "task": 1, "step": 2, "time": 3.0} | {wrong: ["x"]}
    (tmp_path / METRICS).write_text((json.dumps(line) if wrong else "[" * 100_000) + "\n")
    with pytest.raises(CofimaError, match=r"metrics\.jsonl line 1 is not a line of a run"):
        metrics_log.read(tmp_path)


def test_a_kill_at_the_very_end_costs_no_line(tmp_path: Path, tiny: Any) -> None:
    """The model is on disk, and its line is not: the same command writes it, with nothing left to learn."""
    config = tiny.config(train={"epochs": 1})
    launch(config, tmp_path)
    whole = (tmp_path / METRICS).read_text().splitlines()
    (tmp_path / METRICS).write_text("".join(line + "\n" for line in whole[:-1]))
    launch(config, tmp_path)
    last = json.loads((tmp_path / METRICS).read_text().splitlines()[-1])
    wanted = json.loads(whole[-1])
    assert {**last, "time": 0} == {**wanted, "time": 0}
