"""Untrusted recipes and overrides give a configuration or one clear error, in bounded time."""

import string
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cofima.core.errors import CofimaError
from cofima.experiment import config
from cofima.store.config import Config
from cofima.training.device import choose

NAMES = [
    "method",
    "options",
    "dataset",
    "data",
    "backbone",
    "model",
    "stream",
    "train",
    "seed",
    "device",
    "grid",
]
NAMES += [
    "per_dataset",
    "per_backbone",
    "per_method",
    "extends",
    "resources",
    "val_fraction",
    "<<",
    "sed",
    "",
]
INNER = [
    "lam",
    "align",
    "epochs",
    "lr",
    "milestones",
    "img_size",
    "checkpoint",
    "root",
    "groups",
    "base_classes",
]
INNER += [
    "order_seed",
    "test_fraction",
    "split_file",
    "fisher",
    "lora",
    "rank",
    "cofima",
    "coma",
    "digits",
    "*",
]
WORDS = [
    "cofima",
    "coma",
    "digits",
    "folder:~nouser",
    "folder:/nowhere",
    "hf:",
    "torchvision:LSUN",
    "vit_micro",
]
WORDS += [
    "hf-hub:../../x",
    "auto",
    "meta",
    "nan",
    "../" * 40,
    "a" * 300,
    "\x1b[31m",
    "=1",
    "{{x}}",
    "$HOME",
    "🦜",
]
NUMBERS = [0, -1, 1, 7, 2**31, 2**32, 2**64, 10**80, 1e308, float("inf"), float("nan"), 1e-320, 100_000]

leaves = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | st.text(max_size=8)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(INNER) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
recipes = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), values, max_size=5)
keys = st.lists(st.sampled_from(NAMES + INNER) | st.text(max_size=4), min_size=1, max_size=3).map(".".join)
YAML_LIKE = st.text(string.ascii_letters + string.digits + " -:?,[]{}#&*!|>'\"%@`\n\t<=~._\\0x", max_size=60)
overrides = st.builds(lambda key, value: f"{key}={value}", keys, leaves.map(str) | YAML_LIKE) | YAML_LIKE


def outcome(recipe: str, changes: list[str], folder: Path) -> Config | None:
    """Read a recipe; return the configuration, or None after one clear error."""
    path = folder / "recipe.yaml"
    path.write_text(recipe, "utf-8", errors="replace")
    start, found, said = time.process_time(), None, "a configuration"
    try:
        found = config.read(path, changes)
    except CofimaError as error:
        said = str(error)
    assert time.process_time() - start < 5
    assert 0 < len(said.strip()) < 20_000
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


def fuzzed(examples: int) -> Any:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def check_recipe(folder: Path, recipe: dict[str, Any], changes: list[str]) -> None:
    made = outcome(yaml.safe_dump(recipe, allow_unicode=True), changes, folder)
    if made is not None:  # what was taken can be written, and says the same again
        again = config.check(made.model_dump(mode="json"))
        assert repr(again) == repr(made)


@fuzzed(60)
@given(recipes, st.lists(overrides, max_size=3))
def test_any_recipe_is_a_configuration_or_one_error(
    folder: Path, recipe: dict[str, Any], changes: list[str]
) -> None:
    check_recipe(folder, recipe, changes)


@fuzzed(60)
@given(YAML_LIKE, st.lists(overrides, max_size=2))
def test_any_text_is_a_configuration_or_one_error(folder: Path, text: str, changes: list[str]) -> None:
    outcome(text, changes, folder)


@pytest.mark.slow
@fuzzed(4000)
@given(recipes, st.lists(overrides, max_size=3))
def test_thousands_of_recipes(folder: Path, recipe: dict[str, Any], changes: list[str]) -> None:
    check_recipe(folder, recipe, changes)


@pytest.mark.slow
@fuzzed(4000)
@given(YAML_LIKE | st.binary(max_size=80).map(lambda b: b.decode("latin1")), st.lists(overrides, max_size=3))
def test_thousands_of_texts(folder: Path, text: str, changes: list[str]) -> None:
    outcome(text, changes, folder)


BOMB = "\n".join(
    ["a: &a [x, x]", *(f"{c}: &{c} [*{chr(ord(c) - 1)}, *{chr(ord(c) - 1)}]" for c in "bcdefghijklmnopqrs")]
)
ATTACKS = [
    "seed: 2024-13-45",
    "seed: 0b_",
    "seed: !!int foo",
    f"seed: {'1' * 5000}",
    f"seed: 0x{'f' * 5000}",
    "train: &a {lr: *a}",
    "options: &a [*a]",
    f"options: {'[' * 5000}",
    BOMB,
    f"dataset: folder:{'a' * 5000}",
    f"dataset: {'a' * 5000}",
    f"backbone: {'a' * 5000}",
    f"extends: {'a' * 5000}",
    "extends: recipe.yaml",
    "extends: [1]",
    "dataset: folder:~nouser",
    "dataset: ~nouser/x",
    "dataset: 'folder:a\\0b'",
    "model: {img_size: 100000}",
    "1: 2",
    "train: {1: 2}",
    "per_method: {1: {lr: 2}}",
    "per_method: [1]",
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda text: str(text)[:30])
def test_an_attack_is_one_error(attack: str, folder: Path) -> None:
    assert outcome(attack, [], folder) is None


@pytest.mark.parametrize(
    "change",
    [
        "seed=2024-13-45",
        "seed=0b_",
        "seed=!!int x",
        f"seed={'9' * 5000}",
        "train=&a [*a]",
        f"options={'[' * 9999}",
        f"dataset=folder:{'a' * 5000}",
        "dataset=folder:~nouser",
        "data.root=~nouser",
        "model.img_size=100000",
    ],
    ids=lambda text: str(text)[:30],
)
def test_an_override_that_attacks_is_one_error(change: str, folder: Path) -> None:
    if change == "data.root=~nouser":
        outcome("dataset: cub200", [change], folder)  # it is looked for when the images are
    else:
        assert outcome("", [change], folder) is None


def test_a_recipe_that_cannot_be_found_or_is_too_long(folder: Path) -> None:
    for path in ("a" * 5000, "~nouser", "a\0b", "/dev/null/x", str(folder)):
        with pytest.raises(CofimaError, match=r"too long|no configuration file|null"):
            config.read(path)
    (folder / "long.yaml").write_text("#" * 5_000_000)
    with pytest.raises(CofimaError, match="too many for a recipe"):
        config.read(folder / "long.yaml")


def test_a_device_without_numbers_is_none() -> None:
    for name in ("meta", "fpga", "cuda:-1", ""):
        with pytest.raises(CofimaError, match=f"device = {name}: not available here"):
            choose(name)
