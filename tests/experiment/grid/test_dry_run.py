"""Dry runs list every cell with its data, weights and estimated time, without training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from cofima import methods
from cofima.cli.main import app
from cofima.experiment.config import as_overrides, check
from cofima.experiment.grid import estimate as forecasts
from cofima.experiment.grid.cells import cells, name, reduced
from cofima.experiment.grid.estimate import SPEEDS, Speed, forecast, measure
from cofima.methods.components.cost import FISHER_PASS, Cost, Plan
from cofima.store.config import Config


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> Speed:
    """Say that every network takes a second for a step, and a quarter for a forward pass."""
    speed = Speed(1.0, 0.25)
    monkeypatch.setattr(forecasts, "measure", lambda *_: speed)
    return speed


def test_the_time_of_a_cell_is_its_passes_times_the_speed(
    known_speed: Speed, tmp_path: Path, small: Callable[..., Any]
) -> None:
    (cell,) = small({"method": "seq_ft"}, train={"epochs": 3})
    (found,) = forecast([cell], tmp_path, 1)
    train, test = 6 * 4, 6 * 4  # blobs: six classes, four images of each
    assert found.images == (train, test)
    assert found.tasks == 3
    assert found.seconds == 3 * train * 1.0 + 0.25 * test * (1 + 2 + 3) / 3
    assert found.weights == "random"
    assert not found.missing
    assert not found.done


@pytest.mark.parametrize("method", methods.names())
def test_more_epochs_or_images_never_take_less(method: str) -> None:
    built = methods.build(method)
    one, more, twice = (built.cost(Plan(*size, 5)) for size in ((1, 100, 50), (4, 100, 50), (1, 200, 100)))
    assert one.steps <= more.steps
    assert one.forward <= more.forward
    assert one.steps + one.forward < twice.steps + twice.forward


def test_passes_are_counted_by_hand() -> None:
    train, test, epochs, tasks = 100, 40, 2, 4
    plan = Plan(epochs, train, test, tasks)
    seen = test * (1 + 2 + 3 + 4) / 4  # after each task, all classes seen
    expected: dict[str, list[tuple[dict[str, Any], Cost]]] = {
        "seq_ft": [({}, Cost(200, seen))],
        "joint": [({}, Cost(200, test))],
        "prototype": [({}, Cost(0, train + test))],
        "slca": [({}, Cost(200, seen + train))],
        "coma": [
            ({}, Cost(200, seen + train)),
            ({"lam": "auto"}, Cost(200 + 100 * FISHER_PASS, seen + train)),
        ],
        "cofima": [  # every task, and all but the first again
            ({}, Cost(200 + 175 * FISHER_PASS, seen + train)),
            ({"variant": "authors"}, Cost(200 + 100 * FISHER_PASS, seen + train)),
            ({"lam": "auto"}, Cost(200 + 100 * FISHER_PASS, seen + train)),
        ],
        "ewc": [({}, Cost(200 + 100 * FISHER_PASS, seen))],
        "lwf": [({}, Cost(200, seen + 2 * 75))],
        "der_pp": [({}, Cost(600, seen))],
        "bic": [({"memory_size": 20}, Cost(200 + 2 * 20 * 3 / 2, seen + 2 * 75 + train))],
        "gdumb": [({"memory_size": 60}, Cost(2 * (25 + 50 + 60 + 60), seen))],
        "l2p": [({}, Cost(200, seen + train + test))],
        "ranpac": [
            ({}, Cost(25 * 20, train + test)),
            ({"petl": "none"}, Cost(0, train + test)),
        ],
    }
    for method, settings in expected.items():
        for options, cost in settings:
            assert methods.build(method, options).cost(plan) == cost, (method, options)


def test_a_dataset_that_is_not_here_is_forecast_by_what_is_expected(
    known_speed: Speed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COFIMA_DATA", raising=False)
    cell = check({"dataset": "cifar100", "method": "seq_ft", "stream": {"base_classes": 10, "increment": 10}})
    (found,) = forecast([cell], tmp_path, 1)
    assert found.images == (50_000, 10_000)
    assert found.tasks == 10
    assert found.data == "missing"
    assert "cifar-100-python" in found.missing
    assert found.seconds == 20 * 50_000 + 0.25 * 10_000 * 5.5


def test_a_network_is_measured_once_and_kept(
    small: Callable[..., Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = small({"method": "seq_ft"})
    threads = torch.get_num_threads()
    first = measure(cell)
    assert first is not None
    assert 0 < first.forward < first.step * 2
    assert torch.get_num_threads() == threads

    def never(*_: Any) -> Speed:
        raise AssertionError("measured again")

    monkeypatch.setattr(forecasts, "_measure", never)
    assert measure(cell) == first
    with pytest.raises(AssertionError, match="measured again"):
        measure(cell.model_copy(update={"backbone": "test_resnet"}))
    (cache / SPEEDS).write_text("not JSON")
    with pytest.raises(AssertionError, match="measured again"):
        measure(cell)


def test_the_command_lists_cells_for_people_and_for_programs(
    known_speed: Speed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Callable[..., Any]
) -> None:
    found = small({"method": ["coma", "seq_ft"], "seed": [1, 2]})
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["grid", "small.yaml", "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert all(f"runs/small/{name(cell)}" in shown.output for cell in found)
    assert "4 cells" in shown.output
    assert "train.lr=0.1" in shown.output
    whole = CliRunner().invoke(app, ["grid", "small.yaml", "--dry-run", "--json"])
    rows = json.loads(whole.output)
    assert [Config.model_validate(row["config"]) for row in rows] == found
    assert {row["data"]["here"] for row in rows} == {True}
    assert all(row["seconds"] > 0 for row in rows)
    long = CliRunner().invoke(app, ["grid", "small.yaml", "--dry-run", "-v"]).output
    assert "backbone_lr_scale: 0.1" in long
    assert not (tmp_path / "runs").exists()


def test_what_differs_from_the_defaults_gives_the_same_cell(small: Callable[..., Any]) -> None:
    """The short form is the whole truth: written on a command line it resolves to the same."""
    from cofima.experiment.config import resolve

    for cell in small({"method": ["coma", "ranpac", "gdumb"], "seed": 4}):
        assert resolve({}, as_overrides(cell), "x") == cell


def test_a_trial_is_small_and_stands_apart(tmp_path: Path, small: Callable[..., Any]) -> None:
    small({"method": "seq_ft"}, train={"epochs": 20, "milestones": [18]}, data={})
    path = tmp_path / "small.yaml"
    (whole,), (trial,) = cells(path), cells(path, reduced(2, []))
    assert (trial.data.max_train_per_class, trial.data.max_test_per_class, trial.train.epochs) == (2, 2, 1)
    assert name(trial) != name(whole)
    (more,) = cells(path, reduced(2, ["train.epochs=3"]))
    assert more.train.epochs == 3  # what is said has the last word
    assert reduced(None, ["seed=1"]) == ["seed=1"]


def test_a_recipe_may_extend_another(tmp_path: Path) -> None:
    from cofima.core.errors import CofimaError
    from cofima.experiment.config import read_values

    def write(file: str, values: dict[str, Any]) -> Path:
        (tmp_path / file).write_text(yaml.safe_dump(values))
        return tmp_path / file

    write("base.yaml", {"train": {"lr": 0.5, "epochs": 3}, "grid": {"seed": [1, 2]}})
    write("middle.yaml", {"extends": "base.yaml", "train": {"epochs": 4}})
    top = write("top.yaml", {"extends": "middle.yaml", "seed": 7})
    assert read_values(top) == {"train": {"lr": 0.5, "epochs": 4}, "grid": {"seed": [1, 2]}, "seed": 7}
    own = write("own.yaml", {"extends": "base.yaml", "grid": {"method": ["coma"]}})
    assert read_values(own)["grid"] == {"method": ["coma"]}
    assert read_values(write("paper.yaml", {"extends": "table1.yaml"}))["per_dataset"].keys() >= {"vtab"}
    circle = write("base.yaml", {"extends": "top.yaml"})
    with pytest.raises(CofimaError, match="in a circle"):
        read_values(circle)


def test_resources_are_read_in_layers_and_change_no_name(tmp_path: Path) -> None:
    from cofima.core.errors import CofimaError
    from cofima.experiment.grid.cells import plan

    values: dict[str, Any] = {
        "dataset": "blobs",
        "resources": {"cpus": 2},
        "per_method": {"joint": {"resources": {"gpus": 0.5, "slurm": {"timeout_min": 9}}}},
        "grid": {"method": ["joint", "coma"]},
    }
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(values))
    (joint, large), (coma, plain) = plan(path)
    assert (large.cpus, large.gpus, large.slurm) == (2, 0.5, {"timeout_min": 9})
    assert (plain.cpus, plain.gpus) == (2, 0.0)
    path.write_text(
        yaml.safe_dump({key: v for key, v in values.items() if "res" not in key and "per" not in key})
    )
    assert [name(cell) for cell in cells(path)] == [name(joint), name(coma)]
    (_, given), _ = plan(path, ["resources.cpus=4"])
    assert given.cpus == 4
    with pytest.raises(CofimaError, match=r"resources\.cpu = 4: unknown key; did you mean"):
        plan(path, ["resources.cpu=4"])
