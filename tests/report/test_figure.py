"""Figures: valid, repeatable SVG that shows what the runs say and nothing of the machine it was made on."""

import re
import xml.etree.ElementTree as ET

import matplotlib
import pytest

from cofima.report import drawing, figure, runs
from cofima.report.groups import grouped

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def study(make_run, tmp_path):
    for method in ("slca", "cofima", "joint"):
        for seed in (1, 2):
            make_run(f"{method}-{seed}", method=method, seed=seed)
    return grouped(runs.find([tmp_path]))


def words(svg):
    return ["".join(text.itertext()).strip() for text in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("draw", [figure.accuracy, figure.distance, lambda rows: figure.matrix(rows[0])])
def test_the_same_runs_give_the_same_bytes_whatever_the_settings(study, draw):
    first = draw(study)
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        assert draw(study) == first
        assert dict(matplotlib.rcParams) == before
    assert not re.search(r"20\d\d-\d\d-\d\d|Matplotlib", first)


def test_accuracy_names_every_method_and_axis(study):
    text = words(figure.accuracy(study))
    assert {"SLCA", "CoFiMA", "Joint", "After task", "Accuracy on classes seen (%)"} <= set(text)
    assert {"1", "2", "3", "4", "5"} <= set(text)


def test_lines_are_drawn_through_the_means(study):
    """Read a line back from the drawing: with the ticks as a ruler it gives the numbers."""
    svg = figure.accuracy([row for row in study if row.label == "SLCA"])
    tree = ET.fromstring(svg)
    ruler = []
    for tick in (g for g in tree.iter(f"{SVG}g") if g.get("id", "").startswith("ytick")):
        label = next(tick.iter(f"{SVG}text"))
        mark = list(tick.iter(f"{SVG}use"))[-1]
        ruler.append((float(mark.get("y")), float("".join(label.itertext()).replace("−", "-"))))
    (y0, v0), (y1, v1) = ruler[0], ruler[-1]
    path = next(
        p.get("d")
        for p in tree.iter(f"{SVG}path")
        if drawing.SERIES[0] in p.get("style", "") and "fill: none" in p.get("style", "")
    )
    drawn = [
        v0 + (float(y) - y0) * (v1 - v0) / (y1 - y0) for _, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)
    ]
    (row,) = [row for row in study if row.label == "SLCA"]
    expected = []
    for t in range(5):
        seeds = [
            sum(a * n for a, n in zip(run.matrix[t], run.sizes, strict=False)) / sum(run.sizes[: t + 1])
            for run in row.runs
        ]
        expected.append(sum(seeds) / len(seeds))
    assert drawn == pytest.approx(expected, abs=0.01)


def test_a_band_only_where_there_are_several_seeds(study, make_run):
    single = grouped([runs.read(make_run("alone", seed=9))])
    assert "FillBetween" in figure.accuracy(study) or "PolyCollection" in figure.accuracy(study)
    assert not re.search("FillBetween|PolyCollection", figure.accuracy(single))


def test_matrix_shows_each_mean_once(study):
    row = next(row for row in study if row.label == "CoFiMA")
    expected = [
        f"{sum(run.matrix[t][j] for run in row.runs) / 2:.0f}" for t in range(5) for j in range(t + 1)
    ]
    texts = ET.fromstring(figure.matrix(row)).iter(f"{SVG}text")
    assert ["".join(cell.itertext()) for cell in texts if "9px" in cell.get("style")] == expected


def test_joint_has_no_matrix_and_no_steps(study):
    joint = next(row for row in study if row.all_at_once)
    assert figure.matrix(joint) is None
    assert "Joint" in words(figure.accuracy([joint]))


def test_nothing_to_draw_is_none(make_run):
    empty = grouped([runs.read(make_run("a", done=0))])
    assert figure.accuracy(empty) is None
    assert figure.distance(empty) is None
    assert figure.matrix(empty[0]) is None


def test_unmeasured_distances_leave_no_figure(make_run, edit_run):
    folder = edit_run(make_run("a"), lambda _, steps: [step.update(distance={}) for step in steps])
    assert figure.distance(grouped([runs.read(folder)])) is None


def test_labels_are_shown_as_they_are(make_run):
    labels = ["_hidden", "$x$ costs $5", "<b>&", "x" * 80]
    made = [make_run(str(number), label=label) for number, label in enumerate(labels)]
    text = words(figure.accuracy(grouped([runs.read(folder) for folder in made])))
    for label in labels:
        assert any(word.strip("\u200b…") in label and len(word) > 3 for word in text if word != "After task")


@pytest.mark.parametrize("tasks", [1, 2, 24])
def test_every_length_of_stream_is_drawn(make_run, tasks):
    row = grouped([runs.read(make_run("a", tasks=tasks, per_task=1))])
    ET.fromstring(figure.accuracy(row))
    numbers = words(figure.matrix(row[0]))
    assert len(numbers) >= tasks * (tasks + 1) // 2
