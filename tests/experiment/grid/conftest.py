"""Grids that take a second: a network of timm's own, which processes without these tests know too."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from cofima.experiment.grid.cells import cells, name
from cofima.experiment.launch import launch
from cofima.store import model_folder
from cofima.store.config import Config
from cofima.store.record import STATE

SMALL: dict[str, Any] = {
    "dataset": "blobs",
    "data": {"max_train_per_class": 4, "max_test_per_class": 4},
    "backbone": "test_vit",
    "model": {"pretrained": False, "img_size": 32},
    "train": {"epochs": 1, "batch_size": 16, "lr": 0.1, "backbone_lr_scale": 0.1},
    "device": "cpu",
    "per_method": {
        **{
            m: {"options": {"align": {"epochs": 1, "samples_per_class": 8}}}
            for m in ("slca", "coma", "cofima", "ema")
        },
        "ranpac": {"options": {"projection": 32, "adapt": {"epochs": 1}}},
        "dual_prompt": {"options": {"g_layers": [0], "e_layers": [1]}},
        **{m: {"options": {"memory_size": 12}} for m in ("gdumb", "der_pp", "bic")},
    },
}


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., list[Config]]:
    """Return a maker of small cells from the value of a recipe's grid."""

    def make(grid: Any, **more: Any) -> list[Config]:
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(SMALL | more | {"grid": grid}))
        return cells(path)

    return make


def learned(folder: Path) -> tuple[str, list[Any]]:
    """Return what a cell computed: hashes of its weights and its state, and its accuracies."""
    record, rows = model_folder.read(folder).record, model_folder.read_history(folder)
    return record.weights_digest + record.files[STATE], [row.accuracy for row in rows]


@pytest.fixture
def learned_here() -> Callable[[Sequence[Config], Path], None]:
    """Return what learns cells in this process, the last one first."""

    def learn(found: Sequence[Config], out: Path) -> None:
        for config in reversed(found):
            launch(config, out / name(config))

    return learn


@pytest.fixture
def same_cells() -> Callable[[Sequence[Path], Path], None]:
    """Return a check that folders hold the same, bit for bit, as those of these names elsewhere."""

    def check(folders: Sequence[Path], other: Path) -> None:
        assert folders
        for folder in folders:
            assert learned(folder) == learned(other / folder.name), folder.name

    return check
