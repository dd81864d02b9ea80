"""Status of a grid: states and times are read from the folders alone."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cofima.cli.grid import status_table, watching
from cofima.core.progress import SILENT, Progress
from cofima.experiment.grid import status as statuses
from cofima.experiment.grid.status import CellStatus, GridStatus, StatusLines, line, minutes, summary
from cofima.experiment.grid.worker import LOG
from cofima.experiment.launch import launch


def test_a_row_follows_its_folder(tmp_path: Path, tiny: Any) -> None:
    folder, config = (
        tmp_path / "cell",
        tiny.config("seq_ft", data={"max_train_per_class": 4}, train={"epochs": 1}),
    )
    seen = GridStatus.of([folder], slots=1)
    row = seen.rows[folder]
    row.submitted()
    seen.update()
    assert (row.state, row.task, row.elapsed) == ("waiting", 0, None)
    folder.mkdir()
    (folder / LOG).write_text("begun\n")
    seen.update()
    assert row.state == "running"
    assert row.elapsed is not None
    model = launch(config, folder, tasks=1)
    seen.update()
    assert (row.task, row.tasks) == (1, 3)
    assert row.accuracy == pytest.approx(model.history[0].accuracy[0])
    assert row.left is not None
    assert row.left <= 2 * model.history[0].seconds["total"]
    launch(config, folder)
    seen.end(folder, None)
    assert (row.state, row.task, row.fault) == ("done", 3, "")
    assert seen.left == 0


def test_a_log_of_before_does_not_look_like_a_job_that_has_begun(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("the attempt of yesterday\n")
    row = CellStatus("cell", tmp_path)
    row.submitted()
    row.update()
    assert row.state == "waiting"
    with (tmp_path / LOG).open("a") as file:
        file.write("today\n")
    row.update()
    assert row.state == "running"


def test_time_left_is_what_others_took(monkeypatch: Any) -> None:
    monkeypatch.setattr(statuses, "monotonic", lambda: 100.0)
    done = CellStatus("a", Path("a"), "done", task=2, tasks=2, seconds=20.0)
    half = CellStatus("b", Path("b"), "running", task=1, tasks=2, seconds=10.0, _since=96.0)
    rest = [CellStatus(name, Path(name)) for name in "cde"]
    seen = GridStatus({row.folder: row for row in (done, half, *rest)}, slots=2, began=0.0)
    assert half.left == 10 - 4
    assert seen.left == (6 + 3 * 20) / 2
    assert summary(seen) == "cells: 1 done, 1 running, 3 waiting, 0 failed; about 33 s left"
    assert GridStatus({Path("c"): rest[0]}).left is None  # nothing is known yet


def small_status() -> GridStatus:
    rows = [
        CellStatus(
            "alpha", Path("alpha"), "running", task=1, tasks=5, accuracy=91.26, seconds=60.0, taken=True
        ),
        CellStatus("beta", Path("beta"), "failed", fault="no images\nin two lines"),
        *(CellStatus(f"later{n}", Path(f"later{n}")) for n in range(10)),
        CellStatus(
            "first task of 3 cells", Path("first"), "done", counts=False, task=1, tasks=5, accuracy=9.0
        ),
    ]
    return GridStatus({row.folder: row for row in rows}, slots=1)


def test_the_table_shows_what_matters_first_and_counts_the_rest() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(status_table(small_status(), height=4))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [words for words in text.splitlines() if words.strip()]
    assert lines[0].split() == ["cell", "state", "task", "accuracy", "elapsed", "left"]
    assert lines[1].startswith("alpha")
    assert "running, first task shared" in lines[1]
    assert "1/5" in lines[1]
    assert "91.3 %" in lines[1]
    assert "failed: no images" in lines[2]
    assert "two lines" not in text
    assert "... and 8 more" in text
    assert "first task of 3 cells" not in text  # it is done, and no cell
    assert lines[-1].startswith("cells: 0 done, 1 running, 10 waiting, 1 failed; about")


def test_a_terminal_gets_the_table_and_a_file_gets_lines() -> None:
    plain = Console(file=io.StringIO())
    with watching(plain, Progress()) as watch:
        assert isinstance(watch, StatusLines)
    shown = Console(file=io.StringIO(), force_terminal=True, width=120)
    with watching(shown, Progress()) as watch:
        assert not isinstance(watch, StatusLines)
        watch(small_status())
    assert "alpha" in shown.file.getvalue()  # type: ignore[attr-defined]


def test_lines_say_each_change_once() -> None:
    seen, heard = small_status(), []

    class Ears(type(SILENT)):  # type: ignore[misc]
        def say(self, message: str) -> None:
            heard.append(message)

    lines = StatusLines(Ears())
    lines(seen)
    first = list(heard)
    lines(seen)
    assert heard == first
    assert "alpha: task 1/5, 91.3 %, first task shared" in first
    assert "beta: failed: no images\nin two lines" in first
    seen.rows[Path("alpha")].task = 2
    lines(seen)
    assert heard[len(first) :] == ["alpha: task 2/5, 91.3 %"]


def test_times_are_said_as_people_say_them() -> None:
    assert [minutes(s) for s in (5, 89, 600, 7200, 10**6)] == ["5 s", "89 s", "10 min", "2.0 h", "12 days"]
    assert line(CellStatus("x", Path("x"), "running")) == "x: running"
