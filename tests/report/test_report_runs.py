"""Reading run folders: what comes out, and what is said about folders that are damaged."""

import json

import pytest

from cofima.errors import CofimaError
from cofima.report import runs


def test_a_run_is_read_as_written(make_run):
    matrix = [[90.0], [80.0, 70.0]]
    run = runs.read(make_run("a", method="coma", seed=7, tasks=2, matrix=matrix))
    assert (run.label, run.method, run.seed, run.finished) == ("CoMA", "coma", 7, True)
    assert run.matrix == matrix
    assert run.sizes == [70, 71]
    assert run.lam == [None, 0.4]
    assert run.distances == [1.75, 2.0]
    assert run.seconds == [13.5, 13.5]
    assert run.config["options"] == {"lam": 0.4}
    assert sorted(run.tasks[0] + run.tasks[1]) == ["0", "1", "2", "3"]


def test_a_run_in_progress_says_how_far_it_is(make_run):
    run = runs.read(make_run("a", done=3))
    assert not run.finished
    assert run.state == "3 of 5 tasks"
    assert len(run.tasks) == 5


def test_joint_is_one_task_whatever_the_stream_has(make_run):
    run = runs.read(make_run("a", method="joint", planned_tasks=5))
    assert run.joint
    assert run.finished
    assert len(run.tasks) == 1
    assert len(run.tasks[0]) == 10


def test_only_the_generation_in_force_counts(make_run):
    folder = make_run("a", done=3)
    (folder / "0002").mkdir()
    (folder / "0002" / "config.json").write_text("half a fi")
    assert len(runs.read(folder).matrix) == 3


def test_find_searches_folders_of_folders_and_takes_each_run_once(make_run, tmp_path):
    make_run("grid/x/seed1", seed=1)
    make_run("grid/y/deep/seed2", seed=2)
    (tmp_path / "grid" / "not a run").mkdir()
    folder = tmp_path / "grid"
    found = runs.find([folder, folder / "x" / "seed1", folder / "x" / ".." / "x"])
    assert [run.seed for run in found] == [1, 2]


def test_find_names_every_path_without_a_run(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CofimaError) as error:
        runs.find([tmp_path / "empty", tmp_path / "nowhere"])
    assert "empty: no run at or below it" in str(error.value)
    assert "nowhere: no such folder" in str(error.value)


def test_no_run_here(tmp_path):
    with pytest.raises(CofimaError, match=r"no run in .*: it has no file CURRENT"):
        runs.read(tmp_path)


@pytest.mark.parametrize("name", ["0009", "", "../a/0005", "."])
def test_a_pointer_to_nothing_or_elsewhere_is_refused(make_run, name):
    folder = make_run("a")
    (folder / "CURRENT").write_text(name)
    with pytest.raises(CofimaError, match="CURRENT names the generation"):
        runs.read(folder)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", lambda text: text[:50], "config.json: Invalid JSON"),
        (
            "config.json",
            lambda text: text.replace('"format": 2', '"format": 1'),
            r"config.json: format: .* got '1'",
        ),
        (
            "config.json",
            lambda text: text.replace('"label"', '"lable"'),
            "config.json: method.label: Field required",
        ),
        ("config.json", None, "config.json: the file is missing"),
        ("history.jsonl", None, "history.jsonl: the file is missing"),
        ("history.jsonl", lambda text: text[:-30], "history.jsonl line 5: Invalid JSON"),
        ("history.jsonl", lambda text: text.split("\n", 1)[1], "line 1: expected task 1, got task 2"),
        (
            "history.jsonl",
            lambda text: text.replace("[70, 71]", "[69, 71]"),
            r"changed size, from \[70\] to \[69",
        ),
        (
            "history.jsonl",
            lambda text: text.replace('"accuracy": [', '"accuracy": [1.0, ', 1),
            "expected 1 accuracies",
        ),
        ("history.jsonl", lambda text: text.replace('"accuracy": [', '"accuracy": [NaN, ', 1), "line 1"),
        (
            "history.jsonl",
            lambda text: text.replace('"accuracy": [', '"accuracy": [101, ', 1),
            "less than or equal to 100",
        ),
    ],
)
def test_damage_is_named_with_file_and_place(make_run, file, change, message):
    folder = make_run("a")
    path = folder / "0005" / file
    if change is None:
        path.unlink()
    else:
        path.write_text(change(path.read_text()))
    with pytest.raises(CofimaError, match=message):
        runs.read(folder)


def test_all_damage_is_listed_at_once(make_run, tmp_path):
    for name in ("a", "b"):
        generation = make_run(f"grid/{name}") / "0005"
        (generation / "config.json").unlink()
        (generation / "history.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(CofimaError) as error:
        runs.find([tmp_path / "grid"])
    text = str(error.value)
    assert text.count("config.json: the file is missing") == 2
    assert text.count("history.jsonl: cannot be read") == 2
    assert text.count("has 2 problems") == 2


def test_a_file_of_another_kind_is_not_a_history(make_run):
    folder = make_run("a")
    (folder / "0005" / "history.jsonl").write_text(json.dumps([1, 2]) + "\n")
    with pytest.raises(CofimaError, match=r"history.jsonl line 1: "):
        runs.read(folder)
