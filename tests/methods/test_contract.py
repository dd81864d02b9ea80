"""The contract that every method keeps. A new method is found here by its file; nothing is edited for it."""

import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.data.image_set import ImageSet
from cofima.data.stream import Stream, Task
from cofima.experiment.config import check
from cofima.experiment.launch import launch
from cofima.experiment.stream import load_stream
from cofima.methods.state import check as check_state
from cofima.methods.state import remove_class, untagged
from cofima.store import model_folder
from cofima.store.config import Config
from cofima.store.history import dump_rows, parse_rows
from cofima.store.model import Model, load_model
from cofima.training.checkpoint import Budget
from cofima.training.evaluate import Score, evaluate

T = TypeVar("T")

# Options that change what a method keeps and predicts with, beside every method as it is.
VARIANTS: dict[str, dict[str, Any]] = {
    "coma lda": {"classifier": "lda"},
    "cofima power": {"classifier": "lda", "drift": "linear", "closed_form": {"features": "power"}},
    "cofima drift": {"drift": "linear"},
    "weight_ensemble lda drift": {"classifier": "lda", "drift": "linear"},
    "slca ridge": {"classifier": "ridge", "closed_form": {"projection": 64}},
    "ema rows": {},
    "gdumb rows": {},
}
SOLVED_ROWS = ("cofima power", "weight_ensemble lda drift", "ema rows", "gdumb rows")  # train.head_init=lda
every_method = pytest.mark.parametrize("name", methods.names())
PAIRS = [
    *((name, "vit_test") for name in (*methods.names(), *VARIANTS)),
    *((name, "resnet_test") for name in methods.names() if not methods.find(name).needs_vit),
]


def configured(tiny: Any, name: str, network: str = "vit_test", **more: Any) -> Config:
    """Return the configuration of a method or variant."""
    options = VARIANTS.get(name, {}) | more.pop("options", {})
    return tiny.config(name.partition(" ")[0], network, options=options, **more)


class StoppedError(Exception):
    """The end of the first process."""


class Tripwire(Progress):
    """Stop a run in the middle of a task, whatever the method is doing there."""

    def __init__(self, task: int, item: int) -> None:
        self.task, self.left, self.stage_now = task, item, ""

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        self.stage_now = label
        yield

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        for item in items:
            if f"task {self.task}/" in self.stage_now:
                self.left -= 1
                if not self.left:
                    raise StoppedError
            yield item


def kept(model: Model) -> dict[str, Tensor]:
    return model.weights() | {f"state.{k}": v for k, v in model.method.state().items()}


@pytest.mark.parametrize("name", [name for name in methods.names() if methods.find(name).needs_vit])
def test_a_backbone_that_does_not_suit_is_refused_before_any_work(
    name: str, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tiny, name, "resnet_test")
    with pytest.raises(
        CofimaError, match=r"needs a vision transformer .* this backbone is a ResNet"
    ) as error:
        tiny.model(config, tiny.stream())
    assert "\n" not in str(error.value)
    monkeypatch.setattr("cofima.data.datasets.load", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(CofimaError, match=f"{methods.find(name).label} needs a vision transformer"):
        launch(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sizes", [(1, 1, 3), pytest.param((4,), marks=pytest.mark.slow)], ids=str)
@every_method
def test_any_sizes_of_tasks(name: str, sizes: tuple[int, ...], tiny) -> None:
    stream = tiny.stream(sizes, per_class=6)
    model = tiny.model(configured(tiny, name, train={"epochs": 1}), stream)
    seen = model.method.stream(stream)
    for task in seen:
        model.method.learn(task)
        logits = model.logits(stream[0].test.batch(torch.arange(3))[0])
        assert logits.shape == (3, task.classes.stop)
        assert torch.isfinite(logits).all()
        score = evaluate(model.method.predict, seen[: task.index + 1], model.method.context)
        assert all(0 <= accuracy <= 100 for accuracy in score.accuracy)
    for key, value in kept(model).items():
        assert not value.is_floating_point() or torch.isfinite(value).all(), key
        assert not value.requires_grad or key in model.weights()


@dataclass
class Resumed:
    """A run that was interrupted twice: the model of its last process, and the one that is read again."""

    network: str
    config: Config
    model: Model
    read: Model


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def resumed(request: pytest.FixtureRequest, unequal_tasks, tiny, tmp_path_factory) -> Resumed:
    """Learn with checkpoints, and stop in the middle of two tasks: after training, and within an epoch."""
    name, network = request.param
    config = unequal_tasks(name.partition(" ")[0], network, **VARIANTS.get(name, {}))
    if name in SOLVED_ROWS:
        rows = config.train.model_copy(update={"head_init": "lda"})
        config = config.model_copy(update={"train": rows})
    folder, chance = tmp_path_factory.mktemp("cut"), random.Random(name)
    several = len(methods.build(config.method, config.options).stream(tiny.stream())) > 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Budget, "due", lambda self: chance.random() < 0.6)  # some steps are lost
        for task, item in [(2, 3), (3, 5)] if several else [(1, 8)]:
            with pytest.raises(StoppedError):
                launch(config, folder, Tripwire(task, item))
            finished = model_folder.current(folder)
            assert (finished.name if finished else "0000") == f"{task - 1:04d}"
        return Resumed(network, config, launch(config, folder), load_model(folder))


def test_better_than_chance(resumed: Resumed) -> None:
    last = resumed.model.history[-1]
    if resumed.network == "vit_test":  # the other begins with weights that know nothing
        assert np.average(last.accuracy, weights=last.sizes) > 1.8 * 100 / 6
        assert np.average(last.task_aware, weights=last.sizes) > 60


def test_the_history_of_a_task_is_complete_and_json(resumed: Resumed) -> None:
    model = resumed.model
    assert len(model.history) == model.planned
    for row in model.history:
        assert parse_rows(dump_rows([row]), "history.jsonl") == [row]
        json.dumps(row.model_dump(mode="json"), allow_nan=False)
        assert {"total", "evaluate"} <= row.seconds.keys()
        assert row.distance.from_start >= 0
    state = model.method.state().values()
    assert model.history[-1].state_bytes == sum(value.numel() * value.element_size() for value in state)


class Forbidden:
    """Test images that nobody may look at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the test images were looked at: {name}")

    def __len__(self) -> int:
        raise AssertionError("the test images were counted")


def alone(task: Task, seed: int) -> Task:
    """Return a task in a world where every image but its own training images is noise."""
    noise = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, task.train.pixels.shape, dtype=torch.uint8, generator=noise)
    pixels[task.train.rows] = task.train.pixels[task.train.rows]
    return replace(task, train=ImageSet(pixels, task.train.rows, task.train.labels), test=Forbidden())


@dataclass
class Watched:
    """What was seen while the tasks of a run were learned again; lists are of what was seen after each."""

    stream: Stream
    model: Model
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    """Copies of its weights and its state."""
    read: list[set[int]] = field(default_factory=list)
    """The indices of tasks whose images were read while it learned."""
    random: list[bool] = field(default_factory=list)
    """That the global generators were as before."""
    scored: list[bool] = field(default_factory=list)
    """That it scores the same twice, and has the same bits afterwards."""
    scores: list[Score] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.fixture(scope="module")
def watched(resumed: Resumed, tiny, spied_images) -> Watched:
    """Learn the same tasks without the run around them, each where all other images are noise."""
    stream = load_stream(resumed.config, resumed.model.backbone)
    model = tiny.model(resumed.config, stream)
    seen, read = Watched(stream, model), []
    for task in stream:
        near = alone(task, seed=task.index)
        train = spied_images(near.train, lambda index=task.index: read.append(index))
        seed_everything(5)
        before = generators()
        model.method.learn(replace(near, train=train))
        seen.random.append(generators() == before)
        seen.read.append(set(read))
        after = {key: value.clone() for key, value in kept(model).items()}
        scores = [
            evaluate(model.method.predict, stream[: task.index + 1], model.method.context) for _ in "12"
        ]
        now = kept(model)
        same = now.keys() == after.keys() and all(torch.equal(now[key], after[key]) for key in after)
        seen.scored.append(same and scores[0] == scores[1])
        seen.scores.append(scores[0])
        seen.kept.append(after)
        seen.logits.append(model.logits(stream[0].test.batch(torch.arange(3))[0]))
        read.clear()
    return seen


def test_resume_equals_an_uninterrupted_run_with_the_same_seed(
    resumed: Resumed, watched: Watched, same_bits
) -> None:
    """Kills, other images, all test images, scores in between and global randomness may be anything."""
    same_bits(kept(resumed.read), watched.kept[-1])
    assert resumed.read.tasks == resumed.model.tasks == [task.names for task in watched.stream]
    for row, score in zip(resumed.read.history, watched.scores, strict=True):
        assert (row.accuracy, row.top5, row.task_aware) == (score.accuracy, score.top5, score.task_aware)


def test_a_loaded_model_is_the_model(resumed: Resumed, watched: Watched) -> None:
    """It predicts the same; a resumed run shows that it also learns the next task the same."""
    images = watched.stream[0].test.batch(torch.arange(5))[0]
    assert torch.equal(resumed.read.logits(images), watched.model.logits(images))


def test_another_seed_gives_other_bits(resumed: Resumed, watched: Watched, tiny) -> None:
    # the transformer's weights are given: a method that trains none of them draws those of the other network
    if watched.model.method.fixed_features == (resumed.network == "vit_test"):
        return
    other = tiny.model(resumed.config.model_copy(update={"seed": 4}), watched.stream)
    other.method.learn(watched.stream[0])
    assert any(not torch.equal(value, watched.kept[0][key]) for key, value in kept(other).items())


def test_no_image_of_another_task_is_read(watched: Watched) -> None:
    """A method that keeps no images reads those of the task at hand, and no others; none those of tests."""
    for index, read in enumerate(watched.read):
        assert read == {index} or watched.model.method.keeps_images


def test_images_are_kept_only_by_methods_that_say_so_and_within_their_size(watched: Watched) -> None:
    """A memory holds copies of training images of tasks learned, with their labels."""
    method = watched.model.method
    learned: set[tuple[bytes, int]] = set()
    for task, state in zip(watched.stream, watched.kept, strict=True):
        pixels, labels = task.train.batch(torch.arange(len(task.train)))
        learned |= {(p.numpy().tobytes(), y) for p, y in zip(pixels, labels.tolist(), strict=True)}
        images = {key: value for key, value in state.items() if value.dtype == torch.uint8}
        assert bool(images) == method.keeps_images
        for key, value in images.items():
            assert 0 < len(value) <= method.memory_size < len(learned)
            labels = state[key.replace("pixels", "labels")].tolist()
            assert {(p.numpy().tobytes(), y) for p, y in zip(value, labels, strict=True)} <= learned


def test_every_state_is_what_its_method_declares(resumed: Resumed, watched: Watched) -> None:
    """And without a class it still is, or images of the class are kept, which is said."""
    method, sizes, used = watched.model.method, list[int](), set[str]()
    kind = type(method)
    for task, tensors in zip(watched.stream, watched.kept, strict=True):
        state = untagged("state", tensors)
        sizes.append(len(task.classes))
        used |= {entry.name for entry in check_state(kind, state, sizes).values()}
    every = {entry.name for entry in method.entries()}
    # these keep it in a variant only
    assert used == every or (used < every and resumed.config.method in ("coma", "ewc", "weight_ensemble"))
    assert set(method.entries()) <= set(kind.state_schema)
    if any(entry.inseparable for entry in kind.state_schema):
        with pytest.raises(CofimaError, match=f"{kind.label.replace('+', '.')} keeps images of its classes"):
            remove_class(kind, state, sizes, 0)
        return
    left = remove_class(kind, state, sizes, 1)
    check_state(kind, left, [sizes[0] - 1, *sizes[1:]])
    assert left.keys() == state.keys()


def test_scoring_changes_nothing(watched: Watched) -> None:
    assert all(watched.scored)


def test_global_randomness_is_left_as_it_was(watched: Watched) -> None:
    assert all(watched.random)


def test_there_are_logits_for_the_classes_seen_and_all_is_finite(watched: Watched) -> None:
    for task, logits in zip(watched.stream, watched.logits, strict=True):
        assert logits.shape == (3, task.classes.stop)
        assert torch.isfinite(logits).all()
    for state in watched.kept:
        assert all(torch.isfinite(value).all() for value in state.values() if value.is_floating_point())


@every_method
def test_a_backbone_is_taken_or_refused_before_any_work(name: str, tiny, tmp_path: Path) -> None:
    kind = methods.find(name)
    check({"method": name, "options": kind.options_for_any_backbone})
    network = tiny.net("resnet_test").backbone
    if not kind.needs_vit:
        methods.build(name, kind.options_for_any_backbone).check(network)
    if kind.options_for_any_backbone or kind.needs_vit:  # else the defaults suit every backbone
        with pytest.raises(CofimaError, match="ResNet"):
            methods.build(name).check(network)


@every_method
def test_options_survive_json_and_are_complete(name: str) -> None:
    method = methods.build(name)
    options = methods.options_of(method)
    assert set(options) == {field.name for field in fields(method)}
    again = methods.build(name, json.loads(json.dumps(options)))
    assert methods.options_of(again) == options
    assert check({"method": name, "options": options}).options == options


@every_method
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(CofimaError, match=r"options\.no_such_option"):
        check({"method": name, "options": {"no_such_option": 1}})


def test_unknown_methods_get_a_hint() -> None:
    with pytest.raises(CofimaError, match="did you mean 'coma'"):
        methods.find("comma")
    assert methods.names() == sorted(methods.names())
    assert {"seq_ft", "joint", "slca", "coma", "cofima"} <= set(methods.names())
    assert "base" not in methods.names()
