"""Distances between the states of a run: a metric, and the laws of the merges."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cofima.analysis.distance import distance, measure_distances
from cofima.analysis.run_folder import by_layer, layer_of, open_run
from cofima.core.errors import CofimaError
from cofima.report.paper.published import text_number
from cofima.store import model_folder


def test_distances_are_a_metric_and_what_the_definition_says(kept: Any) -> None:
    run = open_run(kept("coma", "resnet_test"))
    found = measure_distances(run)
    matrix, states = found["all"], range(4)
    for s in states:
        assert matrix[s][s] == 0
        for t in states:
            assert matrix[s][t] == matrix[t][s]
            assert all(matrix[s][t] <= (matrix[s][u] + matrix[u][t]) * (1 + 1e-12) for u in states)
    one, two = (model_folder.read(run.folder, run.folder / name).weights() for name in ("0001", "0003"))
    total = sum(float((one[k].double() - two[k].double()).square().sum()) for k in run.parameters)
    assert matrix[1][3] == pytest.approx(math.sqrt(total), rel=1e-12)
    assert "bn1.running_mean" in one
    assert "bn1.running_mean" not in run.parameters
    for s in states:
        over = math.sqrt(sum(found[name][s][3] ** 2 for name in found if name != "all"))
        assert over == pytest.approx(matrix[s][3])


def test_distances_are_those_of_the_history(kept: Any) -> None:
    run = open_run(kept("coma"))
    matrix = measure_distances(run)["all"]
    for t in (2, 3):
        said = run.history[t - 1].distance
        assert matrix[t - 1][t] == pytest.approx(said.merged, rel=1e-9)
        assert matrix[0][t] == pytest.approx(said.from_start, rel=1e-9)
        assert matrix[t - 1][t] == pytest.approx(0.4 * said.trained, rel=1e-4)  # CoMA's law


def test_coma_stays_nearer_than_its_training_alone(kept: Any) -> None:
    coma, slca = (measure_distances(open_run(kept(method)))["all"] for method in ("coma", "slca"))
    assert coma[0][1] == slca[0][1]  # the first task is not merged
    assert coma[1][2] == pytest.approx(0.4 * slca[1][2], rel=1e-4)  # nor do their second trainings differ


def test_rows_hold_all_pairs_and_layers_with_full_precision(kept: Any, tmp_path: Path) -> None:
    folders = [kept("coma"), kept("slca")]
    result = distance(folders)
    run = open_run(folders[0])
    assert len(result.rows) == 2 * 16 * (1 + len(by_layer(run.parameters)))
    files = result.write(tmp_path)
    with files[0].open() as text:
        read = [float(row["distance"]) for row in csv.DictReader(text)]
    assert read == [row["distance"] for row in result.rows]
    assert 'fill="#ffffff"' in files[1].read_text()
    assert "SLCA" in files[1].read_text()


def test_the_printed_distance_stands_beside_ours(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = text_number("distance", "slca", "cifar100", "vit_base_patch16_224.augreg_in21k")
    assert known is not None
    assert known.value == 3.17
    monkeypatch.setattr("cofima.analysis.distance._printed", lambda run: known)
    result = distance([kept("slca")])
    assert "SLCA (printed: 3.17)" in result.figures["distance"]
    assert any(line.startswith("SLCA: 3.17 in the paper") for line in result.summary)


@pytest.mark.parametrize(
    ("key", "layer"),
    [
        ("blocks.3.attn.qkv.weight", "blocks.3"),
        ("layer1.0.conv1.weight", "layer1.0"),
        ("stages.0.blocks.1.mlp.fc1.bias", "stages.0.blocks.1"),
        ("patch_embed.proj.weight", "patch_embed"),
        ("cls_token", "cls_token"),
    ],
)
def test_layers(key: str, layer: str) -> None:
    assert layer_of(key) == layer


def test_all_that_runs_lack_is_said_at_once(kept: Any, tmp_path: Path, tiny: Any) -> None:
    from cofima.experiment.launch import launch

    folder = tmp_path / "pruned"
    launch(tiny.config("seq_ft", train={"epochs": 0}), folder)
    with pytest.raises(CofimaError) as caught:
        distance([folder, tmp_path / "nowhere", kept("coma")])
    assert "does not keep its state after task 1 of 3" in str(caught.value)
    assert "nowhere is not a model folder" in str(caught.value)


def test_another_start_is_noticed(kept: Any) -> None:
    from dataclasses import replace

    run = open_run(kept("coma"))
    other = replace(run, config=run.config.model_copy(update={"seed": 4}))
    with pytest.raises(CofimaError, match=r"are not those that .* began with"):
        other.backbone(0)
    assert torch.equal(run.backbone(0)["cls_token"], run.start["cls_token"])
