"""One schema of history for runs, and for models that are learned, extended and edited."""

from pathlib import Path
from typing import Any

import pytest

import cofima
from cofima.core.errors import CofimaError
from cofima.experiment.launch import launch
from cofima.store import model_folder
from cofima.store.history import HistoryRow, OldClasses, dump_rows, is_run, parse_rows

ROW = HistoryRow(
    kind="extend",
    task=2,
    date="2026-01-02T03:04:05+00:00",
    classes=["line\u2028separator", "é"],
    accuracy=[None, 50.0],
    sizes=[0, 4],
    seconds={"total": 1.5},
    old=OldClasses(before=90.0, after=80.0, measured=False, rests_on="memory"),
)


def test_rows_are_written_and_read_back() -> None:
    rows = [HistoryRow(kind="task", task=1, classes=["a"]), ROW]
    text = dump_rows(rows)
    assert len(text.splitlines()) == 2  # whatever characters the names of classes have
    assert parse_rows(text, "here") == rows


def test_the_overall_accuracy_counts_what_was_measured() -> None:
    assert ROW.overall == 50.0
    assert ROW.measured == [50.0]
    assert (
        HistoryRow(kind="task", task=2, classes=["a"], accuracy=[70.0, 90.0], sizes=[10, 30]).overall == 85.0
    )
    assert HistoryRow(kind="rename", task=1, classes=["a", "b"]).overall is None


def test_all_faults_are_one_error() -> None:
    with pytest.raises(CofimaError, match="here has 4 problems") as error:
        parse_rows(
            '{"task": 1, "kind": "task"}\n{"task": 1, "classes": [], "kind": "dream", "more": 1}\n{', "here"
        )
    for fault in ("line 1: classes", "line 2: kind", "line 2: more", "line 3: Invalid JSON"):
        assert fault in str(error.value)


def test_a_run_and_what_happens_to_it_later_have_one_schema(tmp_path: Path, tiny: Any) -> None:
    launch(tiny.config("slca", stream={"base_classes": 3, "increment": 3}), tmp_path)
    assert is_run(model_folder.read_history(tmp_path))
    clf = cofima.load(tmp_path)
    clf.rename(clf.classes[0], "other")
    clf.remove_class("other")
    clf.save()
    rows = model_folder.read_history(tmp_path)
    assert not is_run(rows)
    assert [(row.kind, row.task) for row in rows[-3:]] == [("task", 2), ("rename", 2), ("remove class", 2)]
    assert all(row.date for row in rows)
    assert rows == cofima.load(tmp_path).history
    assert [row.epochs for row in rows[:2]] == [2, 2]
    with pytest.raises(CofimaError, match="is in use"):
        launch(tiny.config("slca", stream={"base_classes": 3, "increment": 3}), tmp_path)
