"""``cofima analyze`` as a user types it."""

import csv
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cofima.cli.main import app
from cofima.core.errors import CofimaError


def analyze(*words: Any) -> str:
    done = CliRunner().invoke(app, ["-q", "analyze", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_an_analysis_writes_a_figure_and_numbers(kept: Any, tmp_path: Path) -> None:
    analyze("path", kept("cofima"), "--points", 3, "--images", 2, "--out", tmp_path / "new" / "path")
    analyze("lambda", kept("coma"), "--lams", "0,1", "--out", tmp_path)
    analyze("distance", kept("coma"), "-o", tmp_path)
    analyze("fisher", kept("cofima"), "-o", tmp_path)
    analyze("landscape", kept("coma"), "--grid", 5, "--images", 1, "-o", tmp_path)
    analyze("trajectories", kept("coma"), kept("slca"), "--grid", 0, "-o", tmp_path)
    for name in ("path", "lambda_posthoc", "distance", "fisher", "landscape", "trajectories"):
        folder = tmp_path / "new" / "path" if name == "path" else tmp_path
        assert (folder / f"{name}.svg").stat().st_size > 1000
        assert "," in (folder / f"{name}.csv").read_text()


def test_recipes_are_learned(in_process: list[str], tmp_path: Path, pretrained: Path) -> None:
    quick = ["dataset=blobs", "train.epochs=0", "data.max_train_per_class=2", "stream.increment=4"]
    tiny = [*quick, "backbone=vit_test"]
    known = f"model.checkpoint={pretrained}"
    small = ["options.align.epochs=1", "options.align.samples_per_class=2", known]
    said = analyze("scratch", "demo.yaml", *tiny, known, "--methods", "seq_ft", "-o", tmp_path / "a")
    assert "Seq FT, pre-trained: " in said
    assert len(in_process) == 2
    chosen = ["--methods", "coma", "--lams", "0,1", "--val-fraction", 0.5, "--seeds", "1,2"]
    said = analyze("lambda", "demo.yaml", *tiny, *small, *chosen, "-o", tmp_path / "b")
    assert "coma: λ = " in said
    with (tmp_path / "b" / "lambda.csv").open() as text:
        learned = list(csv.DictReader(text))
    assert "2 points in 1 figure" in analyze("lambda", tmp_path / "b" / "cells", "-o", tmp_path / "d")
    with (tmp_path / "d" / "lambda_runs.csv").open() as text:
        drawn = list(csv.DictReader(text))
    for row in drawn:  # the runs of the sweep, found again
        same = [float(one["held_out_last"]) for one in learned if float(one["lam"]) == float(row["lam"])]
        assert float(row["last_mean"]) == pytest.approx(sum(same) / 2)
        assert (row["n"], row["seeds"]) == ("2", "1 2")
    assert "held-out training images" in (tmp_path / "d" / "lambda_blobs_vit_test.svg").read_text()
    given = [*quick, "model.pretrained=false", "--methods", "seq_ft", "--backbones", "vit_test,resnet_test"]
    analyze("backbones", "demo.yaml", *given, "-o", tmp_path / "c")
    assert "resnet_test, Seq FT: " in analyze("backbones", tmp_path / "c" / "cells", "-o", tmp_path / "c")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lambda", "demo.yaml", "--lams", "0,a"], "--lams 0,a: expected numbers"),
        (["lambda", "demo.yaml", "--task", "2"], "--task is for a run folder"),
        (["lambda", "RUN", "train.lr=1"], "take no settings"),
        (["lambda", "EMPTY"], "no run at or below it"),
        (["path", "EMPTY"], "is not a model folder"),
        (["lambda", "nothing.yaml"], "no configuration file nothing.yaml"),
        (["backbones", "demo.yaml"], "--backbones: give two or more"),
        (["path", "RUN", "--out", "FILE"], "cannot be created"),
    ],
)
def test_a_mistake_is_one_message(words: list[str], said: str, kept: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    places = {"RUN": str(kept("coma")), "FILE": str(tmp_path / "file"), "EMPTY": str(tmp_path / "empty")}
    out = [] if "--out" in words else ["--out", str(tmp_path / "out")]
    with pytest.raises(CofimaError, match=said):
        analyze(*(places.get(word, word) for word in words), *out)
