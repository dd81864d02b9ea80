"""Grids: their cells, and that each is learned once, whatever happened before."""

from pathlib import Path

import pytest
import yaml

from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.experiment.config import check, read
from cofima.experiment.grid.cells import cells, name
from cofima.experiment.grid.scheduler import run_grid
from cofima.report import find
from cofima.store import model_folder

RECIPE = {
    "dataset": "blobs",
    "data": {"max_train_per_class": 2},
    "stream": {"base_classes": 3, "increment": 3},
    "train": {"epochs": 0},
    "per_method": {"coma": {"options": {"lam": 0.3}}},
    "grid": [
        {"method": ["prototype", "seq_ft"], "seed": [1, 2]},
        {"method": "coma", "options.align": [{"epochs": 1}, {"epochs": 2}], "seed": 1},
    ],
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def test_a_grid_is_the_union_of_products(recipe: Path) -> None:
    found = cells(recipe)
    assert [(c.method, c.seed) for c in found] == [
        ("prototype", 1),
        ("prototype", 2),
        ("seq_ft", 1),
        ("seq_ft", 2),
        ("coma", 1),
        ("coma", 1),
    ]
    assert [c.options["align"]["epochs"] for c in found[4:]] == [1, 2]
    assert all(c.options["lam"] == 0.3 for c in found[4:])  # what the recipe says for the method holds
    assert len({name(c) for c in found}) == 6


def test_only_leaves_cells_out_and_overrides_hold_for_all(recipe: Path) -> None:
    kept = cells(recipe, ["train.lr=0.5"], ["method=prototype,coma", "seed=1"])
    assert [c.method for c in kept] == ["prototype", "coma", "coma"]
    assert all(c.train.lr == 0.5 for c in kept)
    assert len(cells(recipe, ["seed=7"])) == 4  # cells that became the same are one
    trained = cells(recipe, ["options.statistics=trained"], ["method=coma"])  # others have no such option
    assert [c.options["statistics"] for c in trained] == ["trained"] * 2
    assert (
        len(cells(recipe, [], ["options.align.shrink=true", "train.patience=null"])) == 2
    )  # as YAML has them
    with pytest.raises(CofimaError, match="no cell is left by --only method=nothing"):
        cells(recipe, [], ["method=nothing"])


def test_all_that_is_wrong_in_any_cell_is_said_at_once(recipe: Path) -> None:
    values = RECIPE | {"grid": {"method": ["seq_ft", "cmoa"], "train.lr": [0.1, -1]}}
    recipe.write_text(yaml.safe_dump(values))
    with pytest.raises(CofimaError) as caught:
        cells(recipe)
    assert "unknown method" in str(caught.value)
    assert "train.lr = -1" in str(caught.value)
    values = RECIPE | {"dataset": "folder:nowhere"}
    recipe.write_text(yaml.safe_dump(values))
    with pytest.raises(CofimaError) as caught:
        cells(recipe)
    assert str(caught.value).count("nowhere': there is no folder") == 1  # and not once for each of six cells
    assert "(so do 5 other cells)" in str(caught.value)
    recipe.write_text(yaml.safe_dump(RECIPE | {"grid": {"method": []}}))
    with pytest.raises(CofimaError, match="expected keys with lists"):
        cells(recipe)
    with pytest.raises(CofimaError, match="expected key=value"):
        cells(recipe, [], ["seed"])


def test_the_name_says_what_is_computed_and_nothing_else(recipe: Path) -> None:
    one = cells(recipe)[0]
    assert name(one).startswith("blobs-vit_micro-prototype-1-")
    assert name(one.model_copy(update={"device": "cpu", "keep_checkpoints": True})) == name(one)
    assert name(one.model_copy(update={"val_fraction": 0.5})) != name(one)
    few = one.model_copy(update={"data": one.data.model_copy(update={"max_test_per_class": 1})})
    assert name(few) != name(one)


def test_names_of_folders_stay_when_options_are_added() -> None:
    """Runs that people have would not be found again under other names."""
    assert name(check({"dataset": "blobs", "method": "coma", "seed": 1})) == "blobs-vit_micro-coma-1-f2f3cc76"
    more = {
        "dataset": "digits",
        "method": "cofima",
        "data": {"max_train_per_class": 80},
        "train": {"epochs": 2},
    }
    assert name(check(more)) == "digits-vit_micro-cofima-1993-fa252a39"
    other = name(check(more | {"train": {"epochs": 2, "lora": {"rank": 4}}}))
    assert other not in (name(check(more)), name(check(more | {"train": {"epochs": 2, "lora": {"rank": 8}}})))


def test_a_recipe_with_a_grid_is_also_a_recipe_of_one_run(recipe: Path) -> None:
    assert read(recipe, ["method=coma"]).options["lam"] == 0.3


class Ears(Progress):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def say(self, message: str) -> None:
        self.heard.append(message)


@pytest.mark.usefixtures("forked_workers")
def test_cells_run_in_processes_and_only_what_is_missing_is_done_again(recipe: Path, tmp_path: Path) -> None:
    chosen = cells(recipe, ["device=cpu"], ["seed=1", "method=prototype,seq_ft"])
    broken = cells(recipe, ["device=cpu"], ["seed=2"])[0]
    broken = broken.model_copy(update={"dataset": f"folder:{tmp_path / 'gone'}"})
    out = tmp_path / "out"
    outcome = run_grid([*chosen, broken], out, jobs=2)
    assert sorted(f.name for f in outcome.done) == sorted(name(c) for c in chosen)
    assert [f.name for f in outcome.failed] == [name(broken)]
    assert "no folder" in next(iter(outcome.failed.values()))
    assert all(model_folder.finished(folder) for folder in outcome.done)
    assert len(find(outcome.done)) == 2
    before = {f: f.stat().st_mtime_ns for f in out.rglob("*") if f.is_file()}
    ears = Ears()
    again = run_grid(chosen, out, jobs=2, progress=ears)
    assert sorted(again.done) == sorted(outcome.done)
    assert ears.heard == ["2 of 2 cells are done already"]
    assert {f: f.stat().st_mtime_ns for f in out.rglob("*") if f.is_file()} == before
