"""Layers of recipes: their precedence, and the paper's complete protocol."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.data.transforms import PAPER_DATASETS
from cofima.experiment import config
from cofima.experiment.config import read_values, resolve
from cofima.experiment.grid.cells import cells
from cofima.experiment.recipes.layers import apply_blocks, deep_merge
from cofima.store.config import Config

ORDER = ("recipe", "per_dataset", "per_backbone", "per_method", "command line")
# each layer says its own name for the number of epochs, and for a key of its own
SAYS = {name: number for number, name in enumerate(ORDER, start=1)}
FREE = {part: (lambda name: None) for part in ("dataset", "backbone", "method")}


def layered(*present: str) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {"dataset": "digits", "backbone": "vit_micro", "method": "coma"}
    if "recipe" in present:
        values["train"] = {"epochs": SAYS["recipe"]}
    for part in ("dataset", "backbone", "method"):
        if f"per_{part}" in present:
            values[f"per_{part}"] = {values[part]: {"train": {"epochs": SAYS[f"per_{part}"]}}}
    overrides = [f"train.epochs={SAYS['command line']}"] if "command line" in present else []
    return values, overrides


@pytest.mark.parametrize("strongest", range(len(ORDER) + 1))
def test_the_order_of_the_layers(strongest: int) -> None:
    """Every layer wins over all those before it, whichever of them are there."""
    present = ORDER[:strongest]
    epochs = resolve(*layered(*present), "x").train.epochs
    assert epochs == (strongest or Config().train.epochs)
    if present:
        assert resolve(*layered(present[-1]), "x").train.epochs == strongest


def test_a_layer_changes_only_what_it_says() -> None:
    values: dict[str, Any] = {
        "train": {"batch_size": 7, "lr": 0.5},
        "per_method": {"coma": {"train": {"lr": 0.1}}},
    }
    got = resolve(values, ["method=coma"], "x")
    assert (got.train.batch_size, got.train.lr) == (7, 0.1)
    assert resolve(values, ["method=slca"], "x").train.lr == 0.5


def test_a_block_may_hold_blocks_of_the_kinds_after_it() -> None:
    values: dict[str, Any] = {
        "method": "coma",
        "per_method": {"coma": {"options": {"lam": 0.1}}},
        "per_dataset": {"digits": {"per_method": {"coma": {"options": {"lam": 0.2}}}}},
        "per_backbone": {"vit_*": {"per_method": {"coma": {"options": {"lam": 0.3}}}}},
    }
    assert resolve(values, [], "x").options["lam"] == 0.3
    assert resolve(values, ["backbone=resnet18"], "x").options["lam"] == 0.2
    assert resolve(values, ["backbone=resnet18", "dataset=blobs"], "x").options["lam"] == 0.1
    assert resolve(values, ["method=slca"], "x").method == "slca"


def test_the_command_line_chooses_the_block() -> None:
    values = {"dataset": "blobs", "per_dataset": {"digits": {"seed": 1}, "blobs": {"seed": 2}}}
    assert resolve(values, [], "x").seed == 2
    assert resolve(values, ["dataset=digits"], "x").seed == 1


def test_a_block_may_choose_what_comes_after_it() -> None:
    values = {"per_dataset": {"digits": {"method": "slca"}}, "per_method": {"slca": {"seed": 5}}}
    assert resolve(values, [], "x").seed == 5


def test_patterns_match_and_later_ones_win() -> None:
    values = {"per_backbone": {"vit_*": {"seed": 1, "train": {"epochs": 3}}, "vit_micro": {"seed": 2}}}
    got = resolve(values, [], "x")
    assert (got.seed, got.train.epochs) == (2, 3)


def test_what_is_given_is_not_changed() -> None:
    values, _ = layered(*ORDER)
    before = yaml.safe_dump(values)
    resolve(values, [], "x")
    assert yaml.safe_dump(values) == before


def test_all_wrong_blocks_are_listed_whether_chosen_or_not() -> None:
    values = {"per_dataset": {"digts": {}, "cub200": 3, "digits": {"per_dataset": {}}}}
    with pytest.raises(CofimaError) as caught:
        resolve(values, [], "mine.yaml")
    text = str(caught.value)
    assert text.startswith("mine.yaml has 3 problems:")
    assert "per_dataset.digts: unknown dataset; did you mean 'digits'?" in text
    assert "per_dataset.cub200: expected keys and values, found int" in text
    assert "per_dataset.digits.per_dataset: dataset blocks override dataset blocks" in text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"per_method": {"comma": {}}}, "unknown method; did you mean 'coma'"),
        ({"per_backbone": {"vit_mirco": {}}}, "did you mean 'vit_micro'"),
        ({"per_method": [1]}, "expected a block for each method, found list"),
        ({"per_backbone": {"x*": {"per_dataset": {}}}}, "backbone blocks override dataset blocks"),
    ],
)
def test_wrong_blocks_say_what_to_do(values: dict[str, Any], said: str) -> None:
    with pytest.raises(CofimaError, match=said):
        resolve(values, [], "x")


# The paper's protocol, by dataset: classes of the first and of later tasks, epochs, milestone, temperature
PROTOCOL = {
    "cifar100": (10, 10, 20, 18, 0.1),
    "imagenet_r": (20, 20, 50, 40, 0.1),
    "cub200": (20, 20, 50, 40, 0.1),
    "cars196": (20, 20, 50, 40, 0.05),
    "vtab": (10, 10, 20, 18, 0.1),
}


def table1(dataset: str, method: str, **chosen: str) -> Config:
    """Resolve the recipe without looking for the dataset's files."""
    picks = {"dataset": dataset, "method": method, **chosen}
    defaults = {"dataset": "digits", "backbone": "vit_micro", "method": "cofima"}
    overrides = [f"{key}={value}" for key, value in picks.items()]
    values = apply_blocks(read_values("recipes/table1.yaml"), overrides, defaults, FREE, "table1")
    checkable = deep_merge(values, {"dataset": "digits", "backbone": "vit_micro", "method": method})
    del checkable["grid"]
    return config.check(checkable)


def test_every_cell_of_the_papers_tables_is_a_whole_configuration(subtests: pytest.Subtests) -> None:
    for dataset, method in product(PAPER_DATASETS, methods.names()):
        with subtests.test(dataset=dataset, method=method):
            assert_whole(dataset, method)


def assert_whole(dataset: str, method: str) -> None:
    first, increment, epochs, milestone, temperature = PROTOCOL[dataset]
    got = table1(dataset, method)
    assert (got.stream.base_classes, got.stream.increment) == (first, increment)
    assert got.stream.order_seed == (-1 if dataset == "vtab" else None)
    assert (got.train.batch_size, got.train.lr, got.train.backbone_lr_scale) == (128, 0.01, 0.01)
    assert got.train.epochs == epochs  # "all baselines", says the paper
    constant = method in ("l2p", "dual_prompt")  # Adam, as their papers have it
    assert got.train.milestones == (None if constant else (milestone,))
    keeps = ("l2p", "dual_prompt", "ranpac", "fecam")  # whose code is not a fork of SLCA's
    assert got.model.final_norm == ("pretrained" if method in keeps else "reset")
    if "align" in got.options:
        assert got.options["align"]["shrink"] is False
        assert got.options["align"]["temperature"] == temperature
        assert got.options["align"]["epochs"] == 5
    if method in ("coma", "cofima"):
        assert got.options["lam"] == 0.4
    if "memory_size" in got.options:
        classes = {"cifar100": 100, "imagenet_r": 200, "cub200": 200, "cars196": 196, "vtab": 50}[dataset]
        assert got.options["memory_size"] == 20 * classes


@pytest.mark.parametrize("network", ["vit_b16_mocov3", "vit_base_patch16_224.mae", "vit_b14_dinov2"])
def test_self_supervised_backbones_have_their_own_schedule(network: str) -> None:
    got = table1("cars196", "cofima", backbone=network)
    assert (got.train.epochs, got.train.milestones, got.options["lam"]) == (90, (80,), 0.2)
    assert got.options["align"]["temperature"] == 0.05
    assert table1("cifar100", "seq_ft", backbone=network).train.epochs == 90
    # MAE and DINO keep their norm in the released code, MoCo v3 does not
    assert got.model.final_norm == ("reset" if "moco" in network else "pretrained")


@pytest.mark.parametrize("network", ["vit_ti16", "vit_l16", "vit_b16_sam", "vit_b16_in21k", "vit_b16_dino"])
def test_the_norm_is_made_fresh_where_the_released_code_does(network: str) -> None:
    norm = table1("cifar100", "slca", backbone=network).model.final_norm
    assert norm == ("pretrained" if network == "vit_b16_dino" else "reset")


def test_the_epochs_of_the_prompt_papers_have_a_recipe() -> None:
    found = {(c.dataset, c.method): (c.train.epochs, c.train.milestones) for c in cells("prompts.yaml")}
    assert found == {
        ("cifar100", "l2p"): (5, None),
        ("cifar100", "dual_prompt"): (5, None),
        ("imagenet_r", "l2p"): (10, None),
        ("imagenet_r", "dual_prompt"): (50, None),
    }


def test_the_command_of_the_documentation(tmp_path: Path) -> None:
    values = read_values("recipes/table1.yaml")
    assert values["backbone"] == "vit_base_patch16_224.augreg_in21k"
    assert set(values["per_dataset"]) == set(PAPER_DATASETS)
    assert resolve(values, ["dataset=digits", "method=cofima", "seed=1996"], "x").seed == 1996
    assert "table1.yaml" in config.recipes()
