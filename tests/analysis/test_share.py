"""Analyses that train: the runs they need, the selection criterion, and no run is repeated."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cofima.analysis.backbones import backbones, learn_backbones, scratch
from cofima.analysis.share import Sweep, choose, sweep
from cofima.core.errors import CofimaError
from cofima.experiment.config import read
from cofima.experiment.grid.cells import name
from cofima.report.paper.published import TextNumber
from cofima.report.runs import read as read_run
from cofima.store import model_folder
from cofima.store.generation import CURRENT

RECIPE = {
    "dataset": "blobs",
    "backbone": "vit_test",
    "model": {"pretrained": False},
    "data": {"max_train_per_class": 6},
    "train": {"epochs": 1, "batch_size": 12, "lr": 0.05, "backbone_lr_scale": 0.2},
    "stream": {"base_classes": 2, "increment": 4},
    "device": "cpu",
    "seed": 3,
    **{
        "per_method": {
            m: {"options": {"align": {"epochs": 1, "samples_per_class": 4}}} for m in ("coma", "wise_ft")
        }
    },
}


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return str(path)


def test_lam_is_chosen_on_held_out_images_and_tested_apart(
    recipe: str, in_process: list[str], tmp_path: Path
) -> None:
    how = Sweep(["coma", "wise_ft"], [1.0, 0.0], [3, 4], val_fraction=0.5)
    result = sweep(recipe, [], how, tmp_path)
    assert len(result.rows) == 2 * 2 * 2
    assert len(in_process) == 8 + 2 * 2  # all on held-out images; the chosen ones on test images
    for method in how.names:
        rows = [row for row in result.rows if row["method"] == method]
        means = {
            lam: sum(row["held_out_last"] for row in rows if row["lam"] == lam) / 2 for lam in how.shares
        }
        best = min(lam for lam in means if means[lam] == max(means.values()))
        assert {row["lam"] for row in rows if row["chosen"]} == {best}
        assert all((row["test_last"] != "") == row["chosen"] for row in rows)
    first = next(row for row in result.rows if row["chosen"])
    changes = [f"method={first['method']}", f"options.lam={first['lam']}", f"seed={first['seed']}"]
    tested = read_run(tmp_path / "cells" / name(read(recipe, changes)))
    pairs = list(zip(tested.matrix[-1], tested.sizes, strict=True))
    assert first["test_last"] == sum(a * n for a, n in pairs) / sum(tested.sizes)
    assert "chosen by" in result.summary[0]
    assert "on test images" in result.summary[0]
    again = sweep(recipe, [], how, tmp_path)
    assert len(in_process) == 12  # nothing is learned twice
    assert again.rows == result.rows


def test_more_images_are_tested_where_asked(recipe: str, in_process: list[str], tmp_path: Path) -> None:
    result = sweep(recipe, [], Sweep(["coma"], [0.0, 1.0], tested="none"), tmp_path)
    assert len(in_process) == 2
    assert all(row["test_last"] == "" for row in result.rows)
    assert [row["seed"] for row in result.rows] == [3, 3]  # the recipe's own
    everything = sweep(recipe, [], Sweep(["coma"], [0.0, 1.0], tested="all", by="inc"), tmp_path)
    assert len(in_process) == 4
    assert all(row["test_inc"] != "" for row in everything.rows)


def test_of_equal_shares_the_smallest_is_chosen(kept: Any) -> None:
    run = read_run(kept("coma"))
    assert choose({("coma", lam, 1): run for lam in (0.3, 0.1, 0.2)}, "last") == {"coma": 0.1}


def test_all_mistakes_of_a_sweep_are_said_before_anything_is_learned(
    recipe: str, in_process: list[str], tmp_path: Path
) -> None:
    with pytest.raises(CofimaError) as caught:
        sweep(recipe, [], Sweep(["slca"], [0.5, 1.5], val_fraction=0.0), tmp_path)
    for said in ("--methods slca: it has no option lam", "--lams 1.5", "--val-fraction 0.0"):
        assert said in str(caught.value)
    with pytest.raises(CofimaError, match=r"options\.lam=0\.2: this is set by the analysis"):
        sweep(recipe, ["options.lam=0.2", "train.lr=1"], Sweep(["coma"]), tmp_path)
    with pytest.raises(CofimaError, match="unknown method"):
        sweep(recipe, [], Sweep(["comma"]), tmp_path)
    with pytest.raises(CofimaError, match=r"train\.lr = -1"):
        sweep(recipe, ["train.lr=-1"], Sweep(["coma"]), tmp_path)
    assert not in_process


def test_a_cell_that_failed_is_named(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    from cofima.analysis import cells
    from cofima.experiment.grid.scheduler import GridOutcome

    monkeypatch.setattr(cells, "run_grid", lambda *_: GridOutcome([], {Path("cells/one"): "no memory"}))
    with pytest.raises(CofimaError, match="cells/one: no memory"):
        sweep(recipe, [], Sweep(["coma"], [0.5]), tmp_path)


def test_backbones_are_compared_method_by_method(recipe: str, in_process: list[str], tmp_path: Path) -> None:
    names, chosen = ["vit_test", "resnet_test"], ["seq_ft", "coma"]
    result = learn_backbones(recipe, [], names, chosen, tmp_path)
    assert len(in_process) == 4
    assert [(row["backbone"], row["method"]) for row in result.rows] == [
        (network, label) for network in names for label in ("Seq FT", "CoMA")
    ]
    runs = [read_run(folder) for folder in sorted((tmp_path / "cells").iterdir())]
    seen = {(run.backbone, run.label): run.matrix[-1] for run in runs}
    for row in result.rows:
        right = seen[row["backbone"], row["method"]]
        assert row["last_mean"] == pytest.approx((right[0] * 20 + right[1] * 40) / 60)
    assert backbones([tmp_path / "cells"]).rows[0].keys() == result.rows[0].keys()
    with pytest.raises(CofimaError, match="all of these runs have the backbone vit_test"):
        backbones([run.folder for run in runs if run.backbone == "vit_test"])


def test_numbers_printed_in_the_text_are_drawn_beside_ours(
    recipe: str, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(metric: str, method: str, dataset: str, backbone: str) -> TextNumber | None:
        text = TextNumber(
            metric="Last-Acc", method=method, backbone=backbone, dataset=dataset, value=42.5, source="here"
        )
        return text if (metric, backbone) == ("Last-Acc", "vit_test") else None

    plain = learn_backbones(recipe, [], ["vit_test", "resnet_test"], ["seq_ft"], tmp_path)
    assert "printed in the paper" not in plain.figures["backbones"]
    monkeypatch.setattr("cofima.analysis.backbones.text_number", known)
    result = backbones([tmp_path / "cells"])
    assert {row["backbone"]: row["published_last"] for row in result.rows} == {
        "vit_test": 42.5,
        "resnet_test": "",
    }
    assert "printed in the paper" in result.figures["backbones"]
    assert "vit_test, Seq FT: 42.50 % in the paper (here)" in result.summary


def test_backbones_on_other_images_are_not_compared(
    recipe: str, in_process: list[str], tmp_path: Path
) -> None:
    learn_backbones(recipe, [], ["vit_test", "resnet_test"], ["seq_ft"], tmp_path / "a")
    learn_backbones(recipe, ["val_fraction=0.5"], ["vit_test", "resnet_test"], ["seq_ft"], tmp_path / "b")
    with pytest.raises(CofimaError, match=r"another val_fraction and data\.max_train_per_class than"):
        backbones([tmp_path])


def test_scratch_stands_beside_pretrained_with_its_own_settings(
    recipe: str, in_process: list[str], tmp_path: Path, pretrained: Path
) -> None:
    given = [f"model.checkpoint={pretrained}"]
    with pytest.raises(CofimaError, match=r"model\.pretrained=true: this is set by the analysis"):
        scratch(recipe, ["model.pretrained=true"], ["seq_ft"], [], tmp_path)
    own = ["train.backbone_lr_scale=1"]
    result = scratch(recipe, given, ["seq_ft"], own, tmp_path)
    assert [row["start"] for row in result.rows] == [
        "pre-trained",
        "scratch, same settings",
        "scratch, train.backbone_lr_scale=1",
    ]
    kinds = [read_run(folder).config for folder in sorted((tmp_path / "cells").iterdir())]
    assert sorted((c["model"]["checkpoint"] is None, c["train"]["backbone_lr_scale"]) for c in kinds) == [
        (False, 0.2),
        (True, 0.2),
        (True, 1.0),
    ]
    assert [row["pretraining"].startswith("none") for row in result.rows] == [False, True, True]


def test_cells_go_on_after_an_interruption(recipe: str, tmp_path: Path, in_process: list[str]) -> None:
    how = Sweep(["coma"], [0.5], tested="none")
    sweep(recipe, [], how, tmp_path)
    (folder,) = (tmp_path / "cells").iterdir()
    (folder / CURRENT).write_text("0001\n")  # as if it had been killed in the second task
    sweep(recipe, [], how, tmp_path)
    assert len(model_folder.read(folder).record.tasks) == 2
    assert len(in_process) == 2
