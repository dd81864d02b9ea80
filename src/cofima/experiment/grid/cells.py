"""A grid as its cells: every combination that a recipe names, each a whole configuration.

A recipe's ``grid`` maps keys to the values that they take, ``{method: [coma, cofima], seed: [1, 2]}``;
a list of such maps is the union of their products.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from cofima.core.atomic import json_digest
from cofima.core.errors import CofimaError, problems
from cofima.core.settings import uncounted
from cofima.experiment.config import check, laid, read_values
from cofima.experiment.grid.resources import Resources, check_resources
from cofima.store.config import Config

_UNNAMED = uncounted(Config, "named")


def reduced(max_per_class: int | None, overrides: Sequence[str]) -> list[str]:
    """Return overrides that make a trial of every cell: few images of each class, and one epoch.

    What the user overrides has the last word.
    """
    if max_per_class is None:
        return list(overrides)
    few = [f"data.max_train_per_class={max_per_class}", f"data.max_test_per_class={max_per_class}"]
    return [*few, "train.epochs=1", "train.milestones=null", *overrides]


def cells(path: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> list[Config]:
    """Return the configuration of every cell, each once; all that is wrong is one error.

    ``overrides`` hold for every cell; ``only`` keeps the cells where ``key=value[,value]`` is true.
    """
    return [config for config, _ in plan(path, overrides, only)]


def plan(
    path: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> list[tuple[Config, Resources]]:
    """Return every cell as :func:`cells` does, with what it may use of a machine."""
    values = read_values(path)
    named = values.pop("grid", None) or {}
    blocks = named if isinstance(named, list) else [named]
    wrong = [f"grid: expected keys with lists of values, found {b!r}" for b in blocks if not _is_block(b)]
    wrong += [f"--only {item}: expected key=value[,value]" for item in only if "=" not in item]
    if wrong:
        raise problems(str(path), wrong)
    found: dict[str, tuple[Config, Resources]] = {}
    for changes in [cell for block in blocks for cell in _product(block)]:
        where = f"cell {' '.join(changes)}".rstrip()
        try:
            said = laid(values, [*changes, *overrides], where)
            if any(_chosen(said, item) is False for item in only):
                continue  # what is wrong with a cell that nobody wants does not matter
            needs = check_resources(said.pop("resources", {}), where)
            config = check(said, where)
        except CofimaError as error:
            wrong.append(str(error))
            continue
        if all(_chosen(config.model_dump(mode="json"), item) for item in only):
            found.setdefault(name(config), (config, needs))
    if wrong:
        raise CofimaError("\n".join(dict.fromkeys(wrong)))
    if not found:
        raise CofimaError(f"{path}: no cell is left by --only {' '.join(only)}")
    return list(found.values())


def name(config: Config) -> str:
    """Return the folder's name of a cell: what people look for, and a hash of everything it computes."""
    return f"{plain_name(config)}-{json_digest(identity(config))[:8]}"


def identity(config: Config) -> dict[str, Any]:
    """Return everything that decides what a cell computes."""
    said = config.model_dump(mode="json")
    for key in _UNNAMED:
        *parents, last = key.split(".")
        part = said
        for parent in parents:
            part = part[parent]
        del part[last]
    return said


def plain_name(config: Config) -> str:
    """Return a name by what is learned, and how."""
    dataset = Path(config.dataset.partition(":")[2] or config.dataset).name
    backbone = config.backbone.replace("/", "_").replace(":", "_")
    return f"{dataset}-{backbone}-{config.method}-{config.seed}"


def _is_block(block: Any) -> bool:
    return isinstance(block, Mapping) and all(value not in ([], None) for value in block.values())


def _product(block: Mapping[str, Any]) -> list[list[str]]:
    """Return the ``key=value`` items of each combination of a block's values."""
    axes = [
        [f"{key}={_flow(value)}" for value in (values if isinstance(values, list) else [values])]
        for key, values in block.items()
    ]
    return [list(cell) for cell in product(*axes)]


def _flow(value: Any) -> str:
    """Write a value in one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n...\n").strip()


def _chosen(said: Mapping[str, Any], item: str) -> bool | None:
    """Tell whether ``key=value[,value]`` is true of a cell; None if it says nothing of the key."""
    key, _, wanted = item.partition("=")
    value: Any = said
    for part in key.strip().split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return str(value) in [text.strip() for text in wanted.split(",")]
