"""Tiny runs with a checkpoint after every task, each learned once for all tests of this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cofima.experiment.launch import launch

Kept = Callable[..., Path]


@pytest.fixture(scope="session")
def kept(tiny: Any, shared: Any) -> Kept:
    """Return a function that learns three tasks with a method, or finds the run if it was learned before."""

    def learn(method: str = "coma", network: str = "vit_test", **more: Any) -> Path:
        settings = {
            "keep_checkpoints": True,
            "train": {"epochs": 1},
            "data": {"max_train_per_class": 8},
        } | more
        config = tiny.config(method, network, **settings)
        return shared(f"kept {config}", lambda folder: launch(config, folder / method)) / method

    return learn


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Learn the cells of an analysis in this process, which knows the tiny networks; return their names."""
    from cofima.analysis import cells
    from cofima.experiment.grid.scheduler import GridOutcome
    from cofima.store import model_folder

    learned: list[str] = []

    def run(configs: Any, out: Path, jobs: int, progress: Any) -> GridOutcome:
        outcome = GridOutcome()
        for config in configs:
            folder = out / cells.name(config)
            if not model_folder.finished(folder):
                learned.append(folder.name)
                launch(config, folder)
            outcome.done.append(folder)
        return outcome

    monkeypatch.setattr(cells, "run_grid", run)
    return learned
