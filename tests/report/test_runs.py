"""Reading of run folders, and error messages for damaged ones."""

import pytest

from cofima.core.errors import CofimaError
from cofima.report import runs
from cofima.report.comparison import compare


def test_a_run_is_read_as_written(make_run):
    matrix = [[90.0], [80.0, 70.0]]
    run = runs.read(make_run("a", method="coma", seed=7, tasks=2, matrix=matrix))
    assert (run.label, run.method, run.seed, run.finished) == ("CoMA", "coma", 7, True)
    assert run.matrix == matrix
    assert run.sizes == [70, 71]
    assert [row.lam for row in run.history] == [None, 0.4]
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
    assert run.all_at_once
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
    assert "nowhere: no such folder or study" in str(error.value)


def test_no_run_here(tmp_path):
    with pytest.raises(CofimaError, match=r"is not a model folder: it has no file CURRENT"):
        runs.read(tmp_path)


@pytest.mark.parametrize("name", ["0009", "", "../a/0005", ".", ".."])
def test_a_pointer_to_nothing_or_elsewhere_is_refused(make_run, name):
    folder = make_run("a")
    (folder / "CURRENT").write_text(name)
    with pytest.raises(CofimaError, match="CURRENT names '"):
        runs.read(folder)


@pytest.mark.parametrize("file", ["config.json", "history.jsonl"])
def test_a_file_that_is_not_what_was_written_is_refused(make_run, file):
    path = make_run("a") / "0005" / file
    path.write_text(path.read_text().replace("digits", "digots").replace("95.", "96.").replace("94.", "95."))
    with pytest.raises(CofimaError, match=f"{file}: its content is not what was written"):
        runs.read(path.parents[1])
    path.unlink()
    with pytest.raises(CofimaError, match=file):
        runs.read(path.parents[1])


def sizes_change(content, steps):
    steps[1]["sizes"][0] = 69


def no_number(content, steps):
    steps[0]["accuracy"] = [float("nan")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content, steps: steps.pop(0), "history row 1: expected task 1, got task 2"),
        (sizes_change, r"history row 2: the test sets of earlier tasks changed size, from \[70\] to \[69"),
        (
            lambda content, steps: steps[0]["accuracy"].append(1.0),
            "line 1: .*2 accuracies, and 1 numb",
        ),
        (lambda content, steps: steps[0].update(accuracy=[101]), "line 1: .*less than or equal to 100"),
        (no_number, "line 1: accuracy"),
        (lambda content, steps: content["config"].update(seed=-1), "config: seed: .* got '-1'"),
        (lambda content, steps: content["config"].update(sead=1), "config: sead: Extra inputs"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(make_run, edit_run, change, message):
    with pytest.raises(CofimaError, match=message):
        runs.read(edit_run(make_run("a"), change))


def test_all_damage_is_listed_at_once(make_run, tmp_path):
    for name in ("a", "b"):
        (make_run(f"grid/{name}") / "0005" / "config.json").unlink()
    with pytest.raises(CofimaError) as error:
        runs.find([tmp_path / "grid", tmp_path / "nowhere"])
    assert str(error.value).count("config.json: unreadable") == 2
    assert "nowhere" in str(error.value)


def test_a_study_holds_the_same_runs_in_one_file(make_run, tmp_path):
    folders = [make_run(f"grid/{seed}", seed=seed) for seed in (1, 2)]
    study = tmp_path / "study.jsonl"
    runs.collect(folders[:1], study)
    first = study.read_text()
    runs.collect(folders, study)
    assert study.read_text().startswith(first)  # a run that is there is left as it is
    kept, found = runs.find([study]), runs.find([tmp_path / "grid"])
    assert [run.folder for run in kept] == [study / "1", study / "2"]
    assert {run.source for run in kept} == {study}
    assert [run.history for run in kept] == [run.history for run in found]
    assert [run.config for run in kept] == [run.config for run in found]
    assert compare(kept)[0].table == compare(found)[0].table
    assert len(runs.find([study, study])) == 2


def test_a_study_names_the_folder_of_the_images_without_its_place(make_run, edit_run, tmp_path):
    def locate(content, steps):
        content["data"]["folder"] = "/home/somebody/photos"

    study = tmp_path / "study.jsonl"
    runs.collect([edit_run(make_run("a"), locate), make_run("b", seed=2)], study)
    assert "somebody" not in study.read_text()
    assert [run.record.data.get("folder") for run in runs.find([study])] == ["photos", None]


def test_a_broken_line_of_a_study_is_named(make_run, tmp_path):
    study = tmp_path / "study.jsonl"
    runs.collect([make_run("a"), make_run("b", seed=2)], study)
    lines = study.read_text().splitlines()
    study.write_text("\n".join([lines[0][:-20], lines[1].replace('"task": 1', '"task": 3')]) + "\n")
    with pytest.raises(CofimaError) as error:
        runs.find([study])
    assert "line 1: Invalid JSON" in str(error.value)
    assert "expected task 1, got task 3" in str(error.value)
