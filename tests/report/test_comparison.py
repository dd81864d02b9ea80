"""Tables: grouping of runs into rows and tables, and formatting of numbers."""

import csv
import io
import shutil
import statistics
import subprocess

import pytest

from cofima.report import metrics, render, runs
from cofima.report.comparison import compare
from cofima.report.groups import grouped
from cofima.report.html import page

METHODS = ("seq_ft", "slca", "coma", "cofima", "joint")


@pytest.fixture
def study(make_run, tmp_path):
    """Five methods, three seeds each."""
    for method in METHODS:
        for seed in (1993, 1996, 1997):
            make_run(f"study/{method}-{seed}", method=method, seed=seed)
    return runs.find([tmp_path / "study"])


def build(found):
    return [comparison.table for comparison in compare(found)]


def shown(table):
    return [[str(cell) for cell in row.cells] for row in table.rows]


def titles(table):
    return [column.title for column in table.columns]


def best(table):
    """Return the row and the column of every cell in bold."""
    return {(r, c) for r, row in enumerate(table.rows) for c, cell in enumerate(row.cells) if cell.best}


def cells(table, label):
    return dict(zip(titles(table), next(row for row in shown(table) if row[0] == label), strict=True))


def test_seeds_become_one_row_with_sample_deviation(study):
    (table,) = build(study)
    assert {row[0]: row[1] for row in shown(table)} == dict.fromkeys(
        ("Seq FT", "SLCA", "CoMA", "CoFiMA", "Joint"), "3"
    )
    values = [metrics.last(run.matrix, run.sizes) for run in study if run.method == "coma"]
    expected = f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert cells(table, "CoMA")["Last-Acc"] == expected
    assert "n = 3 seeds, mean ± standard deviation (n − 1)" in table.note
    assert "sha256 0123456789ab" in table.note
    assert "fingerprint fedcba987654" in table.note
    assert "360 test images" in table.note
    assert table.title == "digits, vit_micro, 5 tasks of 2 classes"


def test_columns_are_those_of_the_paper_and_joint_fills_only_its_own(study):
    (table,) = build(study)
    assert titles(table) == ["Method", "n", "Last-Acc", "Inc-Acc", "Forgetting", "Distance", "Seconds"]
    joint = cells(table, "Joint")
    assert shown(table)[-1][0] == "Joint"
    assert joint["Inc-Acc"] == joint["Forgetting"] == "–"
    assert joint["Last-Acc"].startswith("9")
    assert joint["Distance"] == "1.75 ± 0.00"


def test_a_single_seed_has_no_deviation(make_run):
    (table,) = build([runs.read(make_run("a"))])
    assert not any("±" in cell for cell in shown(table)[0])
    assert "±" not in table.note
    assert best(table) == set()


def test_order_of_the_paths_does_not_matter(study):
    assert render.markdown(build(study)) == render.markdown(build(study[::-1]))


def test_options_that_differ_make_rows_and_are_named(make_run):
    folders = [make_run(f"lam{lam}", options={"lam": lam}) for lam in (0.2, 0.4)]
    (table,) = build([runs.read(folder) for folder in folders])
    assert sorted(row[0] for row in shown(table)) == ["CoFiMA (lam=0.2)", "CoFiMA (lam=0.4)"]


def test_an_unfinished_run_is_marked_and_not_mixed_into_the_mean(make_run):
    whole = make_run("whole", seed=1)
    part = make_run("part", seed=2, done=3)
    (table,) = build([runs.read(whole), runs.read(part)])
    assert [(row[0], row[1]) for row in shown(table)] == [("CoFiMA", "1"), ("CoFiMA (3 of 5 tasks)", "1")]


def test_an_unfinished_run_is_never_best(make_run):
    top = [[99.9], [99.9, 99.9]]
    folders = [make_run("a", method="slca"), make_run("b", method="coma"), make_run("c", done=2, matrix=top)]
    (table,) = build([runs.read(folder) for folder in folders])
    marked = {shown(table)[r][0] for r, _ in best(table)}
    assert marked
    assert "CoFiMA (2 of 5 tasks)" not in marked


def test_an_unfinished_run_stands_last_below_a_line(make_run):
    top = [[99.9], [99.9, 99.9]]
    folders = [make_run("a", method="slca"), make_run("b", method="joint"), make_run("c", done=2, matrix=top)]
    (table,) = build([runs.read(folder) for folder in folders])
    names = [(row[0], each.rule) for row, each in zip(shown(table), table.rows, strict=True)]
    assert names == [("SLCA", False), ("Joint", True), ("CoFiMA (2 of 5 tasks)", True)]


def test_the_same_run_twice_counts_once(make_run, tmp_path):
    folder = make_run("a", seed=1)
    shutil.copytree(folder, tmp_path / "copy")
    make_run("b", seed=2)
    (table,) = build(runs.find([tmp_path]))
    assert shown(table)[0][1] == "2"
    assert "1 more with a config and seed already in the table: not counted again." in table.note


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backbone": {"name": "vit_micro", "sha256": "f" * 64}}, "backbone: 01234567… / ffffffff…"),
        ({"data": {"name": "digits", "fingerprint": "0" * 64}}, "dataset: fedcba98… / 00000000…"),
        ({"preprocess": {"size": 224, "mean": [0.5] * 3, "std": [0.5] * 3}}, "preprocess.size: 64 / 224"),
        ({"tasks": 2, "per_task": 5}, "tasks: 5 / 2"),
    ],
)
def test_runs_of_another_protocol_stand_apart_and_the_difference_is_named(make_run, change, named):
    one = runs.read(make_run("a", method="coma"))
    two = runs.read(make_run("b", method="slca", **change))
    first, second = build([one, two])
    assert len(first.rows) == len(second.rows) == 1
    assert named in second.note
    assert "Not comparable with table 1" in second.note
    assert "Not comparable" not in first.note
    assert first.title.startswith("Table 1: ")


def split_of(name: str, digest: str) -> dict[str, object]:
    data = {
        "name": "digits",
        "fingerprint": "fedcba9876543210" * 4,
        "split_id": name,
        "split_hash": digest * 64,
    }
    return {"data": data}


def test_runs_on_other_splits_of_the_same_images_are_never_mixed(make_run):
    one = runs.read(make_run("a", method="coma", **split_of("cub200:official", "a")))
    two = runs.read(make_run("b", method="coma", seed=2, **split_of("cub200:pilot", "b")))
    same = runs.read(make_run("c", method="slca", **split_of("cub200:official", "a")))
    before = runs.read(make_run("d", method="joint"))  # of a version that did not hash splits
    first, second = build([one, two, same, before])
    assert [len(shown(table)) for table in (first, second)] == [3, 2]
    assert "split: aaaaaaaa… / bbbbbbbb…" in second.note
    assert "split cub200:official aaaaaaaaaaaa" in first.note
    head, *rows = csv.reader(io.StringIO(render.csv_text([first, second])))
    splits = {(row[head.index("split_id")], row[head.index("split_hash")][:1]) for row in rows}
    assert {("cub200:official", "a"), ("cub200:pilot", "b")} <= splits


def test_another_class_order_for_the_same_seed_stands_apart(make_run, edit_run):
    one, two = make_run("a", method="coma", seed=5), make_run("b", method="slca", seed=6)
    edit_run(two, lambda content, _: content["config"].update(seed=5))
    tables = build([runs.read(one), runs.read(two)])
    assert len(tables) == 2
    assert "another order of the classes for the same seed" in tables[1].note


def test_joint_joins_every_table_with_its_classes(make_run):
    five = make_run("five", tasks=5, per_task=2)
    two = make_run("two", tasks=2, per_task=5)
    joint = make_run("joint", method="joint")
    tables = build([runs.read(folder) for folder in (five, two, joint)])
    assert [[row[0] for row in shown(table)] for table in tables] == [["CoFiMA", "Joint"]] * 2


def test_joint_on_other_classes_stands_alone(make_run):
    tables = build([runs.read(make_run("a", tasks=4)), runs.read(make_run("b", method="joint"))])
    assert [[row[0] for row in shown(table)] for table in tables] == [["CoFiMA"], ["Joint"]]
    assert "not the same classes" in tables[1].note


def test_a_run_before_its_first_task_shows_dashes(make_run):
    (table,) = build([runs.read(make_run("a", done=0))])
    assert shown(table) == [["CoFiMA (0 of 5 tasks)", "1", "–", "–", "–", "–", "–"]]


def test_best_is_marked_by_direction_and_joint_never(study):
    (table,) = build(study)
    values = {row[0]: row for row in shown(table) if row[0] != "Joint"}
    for c, pick in ((2, max), (3, max), (4, min)):
        top = pick(float(row[c].split(" ± ")[0]) for row in values.values())
        marked = [shown(table)[r] for r, column in best(table) if column == c]
        assert marked
        assert all(row[0] != "Joint" and float(row[c].split(" ± ")[0]) == top for row in marked)
    assert not any(column == 5 for _, column in best(table))  # a distance is neither good nor bad


def test_small_distances_keep_their_digits(make_run, edit_run):
    folder = edit_run(make_run("a"), lambda _, steps: steps[-1]["distance"].update(from_start=0.00123))
    (table,) = build([runs.read(folder)])
    assert cells(table, "CoFiMA")["Distance"] == "0.00123"


def test_markdown_has_one_bar_more_than_columns_whatever_the_label(make_run):
    label = "a|b *c* <i>\nd"
    text = render.markdown(build([runs.read(make_run("a", label=label))]))
    row = next(line for line in text.splitlines() if "c" in line and line.startswith("| a"))
    assert row.replace(r"\|", "").count("|") == 8
    assert r"a\|b \*c\* \<i\> d" in row


def test_csv_holds_unrounded_numbers(study):
    (table,) = build(study)
    lines = list(csv.DictReader(io.StringIO(render.csv_text([table]))))
    coma = next(line for line in lines if line["method"] == "coma")
    values = [metrics.incremental(run.matrix, run.sizes) for run in study if run.method == "coma"]
    assert float(coma["inc_acc_mean"]) == statistics.fmean(values)
    assert float(coma["inc_acc_std"]) == statistics.stdev(values)
    assert coma["seeds"] == "1993 1996 1997"
    assert coma["n"] == "3"
    joint = next(line for line in lines if line["method"] == "joint")
    assert joint["forgetting_mean"] == joint["forgetting_std"] == ""


def test_latex_escapes_and_marks(study, make_run):
    strange = runs.read(make_run("odd", label=r"50% & $x_1$ #{a}~^\b", seed=1993, options={"x": 1}))
    text = render.latex(build([*study, strange]))
    assert r"50\% \& \$x\_1\$ \#\{a\}\textasciitilde{}\textasciicircum{}\textbackslash{}b" in text
    assert text.count(r"\midrule") == 2  # under the head, and above the upper bound
    assert r"$\mathbf{" in text
    assert r" \pm " in text
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert all(line.replace(r"\&", "").count("&") == 6 for line in body)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not on PATH")
def test_latex_compiles(study, make_run, tmp_path):
    strange = runs.read(make_run("odd", label=r"50% & $x_1$ #{a}~^\b", done=2))
    table = render.latex(build([*study, strange]))
    source = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n" + table + "\\end{document}\n"
    (tmp_path / "t.tex").write_text(source)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:]


def test_runs_scored_on_held_out_images_are_not_test_results(make_run, edit_run):
    """Such runs choose settings; they stand apart, and the note says what they were scored on."""
    test, chosen = make_run("a", method="coma"), make_run("b", method="slca")
    edit_run(chosen, lambda content, _: content["config"].update(val_fraction=0.2))
    tables = build([runs.read(test), runs.read(chosen)])
    notes = {shown(table)[0][0]: table.note for table in tables}
    assert "360 test images" in notes["CoMA"]
    assert "360 training images held out, not the test images" in notes["SLCA"]
    assert "val_fraction: 0.0 / 0.2" in tables[1].note or "val_fraction: 0.2 / 0.0" in tables[1].note


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cuda"},
        {"keep_checkpoints": True},
        {"data": {"root": "/elsewhere", "layout": "other", "split_file": "x.csv"}},
        {"data": {"preset": "timm", "skip_unreadable": True}},
        {"dataset": "folder:/elsewhere/digits", "backbone": "vit_micro.of_another_name"},
        {"model": {"checkpoint": "/elsewhere/weights.npz"}},
    ],
)
def test_settings_whose_effect_is_recorded_do_not_split_a_row(make_run, edit_run, settings):
    folders = [make_run("a", seed=1), make_run("b", seed=2)]
    edit_run(folders[1], lambda content, _: content["config"].update(settings))
    (table,) = build([runs.read(folder) for folder in folders])
    assert [row[:2] for row in shown(table)] == [["CoFiMA", "2"]]


def test_runs_from_scratch_are_no_repetitions_of_pretrained_ones(make_run, edit_run):
    """Analyses group runs of other weights too: neither may be taken for the other, and dropped."""
    folders = [make_run("a"), make_run("b")]
    edit_run(folders[1], lambda content, _: content["config"].update(model={"pretrained": False}))
    found = grouped([runs.read(folder) for folder in folders])
    assert [(group.label, group.repeats) for group in found] == [
        ("CoFiMA (model.pretrained=true)", 0),
        ("CoFiMA (model.pretrained=false)", 0),
    ]


IDENTITY = {
    "alias": "vit_b16_in21k",
    "tag": "augreg_in21k",
    "pretraining": "ImageNet-21k",
    "overlap": "all <classes>",
    "layout": "as published",
    "final_norm": "reset",
}


def test_the_note_says_what_the_backbone_has_seen(make_run):
    kept = {"name": "vit_base_patch16_224.augreg_in21k", "sha256": "0" * 64} | IDENTITY
    run = runs.read(make_run("a", backbone=kept))
    (table,) = build([run])
    said = "Backbone: vit_b16_in21k, final norm reset, pre-trained on: ImageNet-21k; shared with digits: all"
    assert said in table.note
    assert "pre-trained on: ImageNet-21k" in render.markdown([table])
    assert "pre-trained on: ImageNet-21k" in render.latex([table])
    (line,) = csv.DictReader(io.StringIO(render.csv_text([table])))
    assert {key: line[f"backbone_{key}"] for key in IDENTITY if key != "tag"} == {
        key: value for key, value in IDENTITY.items() if key != "tag"
    }
    shown = page([run])
    assert "<dt>overlap</dt><dd>all &lt;classes&gt;</dd>" in shown
    assert "<dt>sha256</dt><dd>" + "0" * 64 in shown


def test_a_run_from_before_this_was_recorded_says_nothing_of_it(make_run):
    run = runs.read(make_run("a"))
    assert "pre-trained on" not in build([run])[0].note
    assert run.origin == ""


def test_another_final_norm_stands_apart(make_run):
    kept = {"name": "vit_micro", "sha256": "0123456789abcdef" * 4}
    one = runs.read(make_run("a", method="coma", backbone=kept))
    two = runs.read(make_run("b", method="slca", backbone=kept | {"final_norm": "reset"}))
    assert "final_norm: pretrained / reset" in build([one, two])[1].note
