"""A method in a user's own file that keeps something for each class: nothing elsewhere knows of it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import cofima
from cofima import methods
from cofima.core import plugins
from cofima.core.errors import CofimaError
from cofima.data.sources.in_memory import blobs
from cofima.experiment.grid import estimate, shared_first_task
from cofima.experiment.grid.estimate import Speed
from cofima.experiment.launch import launch
from cofima.store.config import Config

UNDECLARED = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cofima.data.stream import Task
from cofima.methods import Method


@dataclass(eq=False)
class Means(Method):
    """Fine-tune with old classes pulled to their means, which are kept."""

    strength: float = 0.5

    label: ClassVar[str] = "Means"

    def begin(self, task: Task) -> None:
        if task.index == 0:
            self.prototypes = torch.zeros(0, self.net.head.features)
        super().begin(task)

    def end(self, task: Task) -> None:
        if task.index > 0:
            flat = self.net.head.flat()
            flat["weight"][: len(self.prototypes)].lerp_(self.prototypes, 0.01 * self.strength)
            self.net.head.load_flat(**flat)
        features = self.features(task.train)
        means = [features[task.train.labels == label].mean(0) for label in task.classes]
        self.prototypes = torch.cat([self.prototypes, torch.stack(means)])

    def state(self) -> dict[str, Tensor]:
        return {"prototypes": self.prototypes}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.prototypes = state["prototypes"]
'''

DECLARED = (
    UNDECLARED.replace(
        "from cofima.methods import Method\n",
        "from cofima.methods import Method\n"
        "from cofima.methods.components.cost import Cost, Plan\n"
        "from cofima.methods.state import Entry\n",
    )
    + """
    state_schema: ClassVar[tuple[Entry, ...]] = (Entry("prototypes", axis="class", merge="average"),)

    def first_task_key(self) -> tuple[str]:
        return ("means",)

    def cost(self, plan: Plan) -> Cost:
        return super().cost(plan).plus(forward=plan.train)
"""
)


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end without plugins."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setenv(plugins.ENVIRONMENT, "")
    yield
    for name in [name for name in sys.modules if name.startswith("cofima_plugin_")]:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], None]:
    """Return what writes the method ``means`` into a file of the user, and loads it."""

    def written(text: str) -> None:
        (tmp_path / "means.py").write_text(text, "utf-8")
        plugins.load(tmp_path / "means.py")

    return written


both = pytest.mark.parametrize("text", [DECLARED, UNDECLARED], ids=["declared", "undeclared"])


def small(tiny: Any, **options: Any) -> Config:
    short = {
        "stream": {"base_classes": 2, "increment": 2},
        "train": {"epochs": 2},
        "data": {"max_train_per_class": 8},
    }
    config: Config = tiny.config("means", options=options, **short)
    return config


def photos(folder: Path, *labels: int) -> Path:
    """Write a few images of classes that a tiny run has not learned."""
    images = blobs(9, per_class=6, side=16, seed=1).train
    for label in labels:
        (folder / f"new {label}").mkdir(parents=True)
        for place in (images.labels == label).nonzero().flatten():
            pixels, _ = images.batch(place[None])
            Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(folder / f"new {label}/{int(place)}.png")
    return folder


def prototypes(model: Any) -> torch.Tensor:
    kept: torch.Tensor = model.method.state()["prototypes"]
    return kept


@both
def test_it_runs_and_resumes(
    text: str, write: Any, tiny: Any, tmp_path: Path, stop_at: Any, same_bits: Any
) -> None:
    write(text)
    config = small(tiny)
    whole = launch(config, tmp_path / "whole")
    with pytest.raises(stop_at(1, step=2)):
        launch(config, tmp_path / "cut")
    cut = launch(config, tmp_path / "cut")
    same_bits(cut.weights(), whole.weights())
    same_bits(cut.method.state(), whole.method.state())
    assert len(prototypes(whole)) == len(whole.classes)


def test_a_class_that_is_removed_takes_its_row_along(write: Any, tiny: Any, tmp_path: Path) -> None:
    write(DECLARED)
    launch(small(tiny), tmp_path / "run")
    clf = cofima.load(tmp_path / "run")
    before, gone = prototypes(clf.model), clf.classes[2]
    clf.remove_class(gone)
    clf.save()
    again = cofima.load(tmp_path / "run")
    assert gone not in again.classes
    assert torch.equal(prototypes(again.model), torch.cat([before[:2], before[3:]]))
    again.extend(photos(tmp_path / "photos", 7))
    assert len(prototypes(again.model)) == len(again.classes) == len(before)


def test_what_is_not_declared_is_refused_before_a_class_is_removed(
    write: Any, tiny: Any, tmp_path: Path
) -> None:
    write(UNDECLARED)
    launch(small(tiny), tmp_path / "run")
    clf = cofima.load(tmp_path / "run")
    with pytest.raises(CofimaError, match=r"Means keeps 'prototypes'.*state_schema of Means") as error:
        clf.remove_class(clf.classes[2])
    assert "\n" not in str(error.value)
    assert len(clf.classes) == len(prototypes(clf.model))


@pytest.mark.parametrize("axis", ["axis='class', dim=1", "axis='class', dim=2"])
def test_a_declaration_that_is_wrong_is_refused_likewise(
    axis: str, write: Any, tiny: Any, tmp_path: Path
) -> None:
    write(DECLARED.replace('axis="class"', axis))
    launch(small(tiny), tmp_path / "run")
    clf = cofima.load(tmp_path / "run")
    with pytest.raises(CofimaError, match=r"Means keeps 'prototypes' of shape \[\d+, 16\]: the state_schema"):
        clf.remove_class(clf.classes[2])


@both
def test_it_is_extended(text: str, write: Any, tiny: Any, tmp_path: Path) -> None:
    write(text)
    launch(small(tiny), tmp_path / "run")
    clf = cofima.load(tmp_path / "run")
    before = prototypes(clf.model)
    clf.extend(photos(tmp_path / "photos", 7, 8))
    clf.save()
    kept = prototypes(cofima.load(tmp_path / "run").model)
    assert torch.equal(kept[: len(before)], before)
    assert len(kept) == len(before) + 2


@pytest.mark.parametrize(("text", "features"), [(DECLARED, 1), (UNDECLARED, 0)], ids=["own", "plain"])
def test_a_dry_run_asks_it_for_its_cost(
    text: str, features: int, write: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(text)
    monkeypatch.setattr(estimate, "measure", lambda *_: Speed(1.0, 0.25))
    (found,) = estimate.forecast([small(tiny)], tmp_path, 1)
    assert found.images is not None
    assert found.tasks is not None
    train, test = found.images
    assert found.seconds == 2 * train + 0.25 * (test * (found.tasks + 1) / 2 + features * train)


def test_cells_share_its_first_task_where_it_says_so(
    write: Any, tiny: Any, tmp_path: Path, same_bits: Any
) -> None:
    write(DECLARED)
    one, two = small(tiny, strength=0.2), small(tiny, strength=0.8)
    assert shared_first_task.key(one) is not None
    assert shared_first_task.key(one) == shared_first_task.key(two)
    launch(one, tmp_path / "first", tasks=1)
    assert shared_first_task.take(tmp_path / "first", two, tmp_path / "taken")
    taken, alone = launch(two, tmp_path / "taken"), launch(two, tmp_path / "alone")
    same_bits(taken.weights(), alone.weights())
    same_bits(taken.method.state(), alone.method.state())


def test_cells_share_nothing_where_it_says_nothing(write: Any, tiny: Any) -> None:
    write(UNDECLARED)
    assert shared_first_task.key(small(tiny)) is None


def test_a_method_derived_from_one_of_ours_shares_and_declares_only_what_it_says_itself(
    write: Any, tiny: Any
) -> None:
    write(
        "from dataclasses import dataclass\n"
        "from cofima.methods.slca import SLCA\n\n"
        "@dataclass(eq=False)\nclass Means(SLCA):\n    '''Align.'''\n    label = 'Means'\n"
    )
    assert shared_first_task.key(small(tiny)) is None
    assert methods.fallback_for({"raw_head.", "gaussians."}) == ("slca", {})
