"""Packaged recipes: every grid is right; those of the paper's tables have its cells, which can be learned."""

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cofima.data import datasets
from cofima.experiment.config import recipes
from cofima.experiment.grid.cells import cells, name, reduced
from cofima.experiment.grid.scheduler import run_grid
from cofima.store.config import Config

FOUR = {"cub200", "cars196", "cifar100", "imagenet_r"}
SEEDS = {1993, 1996, 1997}
TABLES: dict[str, tuple[int, set[str], set[str]]] = {  # cells, datasets, methods
    "table1.yaml": (14 * 4 * 3, FOUR, {"l2p", "dual_prompt", "ranpac", "bic", "joint", "cofima"}),
    "table2.yaml": (12 * 4 * 3, FOUR, {"ranpac", "bic", "joint", "cofima"}),
    "table3.yaml": (8 * 4 * 3, FOUR, {"seq_ft", "prototype", "slca", "ema", "coma", "weight_ensemble"}),
    "lambda.yaml": (3 * 11 * 4 * 2, FOUR, {"coma", "cofima", "wise_ft"}),
    "scratch.yaml": (2 * 2 * 2 * 3 * 3, {"cifar100", "imagenet_r"}, {"joint", "cofima"}),
    "backbones.yaml": (2 * 8 * 3, {"cifar100", "cub200"}, {"joint", "slca", "cofima"}),
}


@functools.cache
def whole(recipe: str) -> list[Config]:
    """Return all cells of a recipe: some hundred, which takes seconds."""
    return cells(recipe)


@pytest.mark.parametrize("recipe", recipes())
def test_every_grid_is_right_and_a_table_has_the_cells_of_the_paper(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "check", lambda *_: None)  # their images may not be here
    found = whole(recipe)
    assert len({name(cell) for cell in found}) == len(found) >= 1
    if recipe not in TABLES:
        return
    count, data, some = TABLES[recipe]
    assert len(found) == count
    assert {cell.dataset for cell in found} == data
    assert {cell.method for cell in found} >= some
    if recipe not in ("lambda.yaml", "backbones.yaml"):
        assert {cell.seed for cell in found} == SEEDS


def test_every_table_is_packaged() -> None:
    assert set(TABLES) <= set(recipes())


def test_schedules_follow_backbones_and_datasets() -> None:
    def epochs(found: list[Config], **chosen: str) -> set[int]:
        fits = [c for c in found if all(getattr(c, key) == value for key, value in chosen.items())]
        assert fits
        return {cell.train.epochs for cell in fits}

    assert epochs(whole("table1.yaml"), dataset="cifar100", method="coma") == {20}
    assert epochs(whole("table2.yaml")) == {90}
    others = whole("backbones.yaml")
    assert epochs(others, backbone="vit_ti16", dataset="cub200") == {50}
    assert epochs(others, backbone="vit_b16_mae") == epochs(others, backbone="vit_b14_dinov2") == {90}
    lams = {cell.backbone: cell.options["lam"] for cell in others if cell.method == "cofima"}
    assert (lams["vit_l16"], lams["vit_b16_mocov3"]) == (0.4, 0.2)


def writers() -> ModuleType:
    """Return the module that writes small datasets in their real formats."""
    path = Path(__file__).parents[2] / "data" / "conftest.py"
    spec = importlib.util.spec_from_file_location("dataset_writers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the four datasets of the paper, three classes each, in the formats in which they come."""
    root, made = tmp_path_factory.mktemp("data"), writers()
    made.cifar100_python(root)
    made.cub200_raw(root)
    made.cars196_devkit(root)
    made.imagenet_r_folders(root)
    return root


# a backbone that needs no weights, three classes in two tasks, and projections that fit it
SMALL = ["backbone=test_vit", "model.pretrained=false", "model.img_size=32", "model.checkpoint=null"]
DEAL = ["stream.base_classes=2", "stream.increment=1", "device=cpu", "train.batch_size=8"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TABLES)
def test_a_table_is_learned_from_end_to_end_in_its_reduced_form(
    recipe: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COFIMA_DATA", str(data))
    changes = reduced(2, [*SMALL, *DEAL])
    only = ["seed=1993"] + (["options.lam=0.0,0.5,1.0"] if recipe == "lambda.yaml" else [])
    found = [cell for cell in cells(recipe, changes, only) if cell.method != "ranpac"]
    if any(cell.method == "ranpac" for cell in cells(recipe, changes, only)):
        found += cells(recipe, [*changes, "options.projection=32"], ["seed=1993", "method=ranpac"])
    outcome = run_grid(found, tmp_path, jobs=2)
    assert not outcome.failed
    assert sorted(folder.name for folder in outcome.done) == sorted(map(name, found))
    assert {cell.dataset for cell in found} == TABLES[recipe][1]


@pytest.mark.slow
def test_a_broken_cell_of_a_table_leaves_the_others(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """One dataset is missing: its cells fail with what is expected where, all others are learned."""
    monkeypatch.setenv("COFIMA_DATA", str(data))
    monkeypatch.chdir(tmp_path)
    changes = reduced(2, [*SMALL, *DEAL])
    found = cells("table3.yaml", changes, ["seed=1993", "method=prototype"])
    gone = [c for c in found if c.dataset == "cub200"]
    (data / "CUB_200_2011").rename(tmp_path / "elsewhere")
    try:
        outcome = run_grid(found, tmp_path / "out", jobs=1)
    finally:
        (tmp_path / "elsewhere").rename(data / "CUB_200_2011")
    assert [folder.name for folder in outcome.failed] == [name(cell) for cell in gone]
    assert "CUB_200_2011" in next(iter(outcome.failed.values()))
    assert len(outcome.done) == 3
