"""Cells of a grid: all combinations of values in a recipe, each a complete configuration.

A recipe's ``grid`` maps keys to lists of values, ``{method: [coma, cofima], seed: [1, 2]}``, and means their
Cartesian product; a list of such maps means the union of their products.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cofima.core.atomic import json_digest
from cofima.core.errors import CofimaError, problems
from cofima.core.settings import uncounted
from cofima.experiment.config import apply_layers, changed, check, read_values, validation_problems
from cofima.experiment.grid.resources import Resources
from cofima.store.config import Config

_UNNAMED = uncounted(Config, "named")


def reduced(max_per_class: int | None, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a trial: ``max_per_class`` images per class, one epoch, then ``overrides``."""
    if max_per_class is None:
        return list(overrides)
    few = [f"data.max_train_per_class={max_per_class}", f"data.max_test_per_class={max_per_class}"]
    return [*few, "train.epochs=1", "train.milestones=null", *overrides]


def cells(path: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> list[Config]:
    """Return the configurations of all cells, without duplicates; see :func:`plan`."""
    return [config for config, _ in plan(path, overrides, only)]


def plan(
    path: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> list[tuple[Config, Resources]]:
    """Return configuration and resources of all cells, without duplicates; one error lists all problems.

    ``overrides`` apply to every cell; ``only`` keeps the cells that match ``key=value[,value]``.
    """
    values = read_values(path)
    named = values.pop("grid", None) or {}
    blocks = named if isinstance(named, list) else [named]
    wrong = [f"grid: expected keys with lists of values, found {b!r}" for b in blocks if not _is_block(b)]
    wrong += [f"--only {item}: expected key=value[,value]" for item in only if "=" not in item]
    if wrong:
        raise problems(str(path), wrong)
    found: dict[str, tuple[Config, Resources]] = {}
    messages: dict[str, list[str]] = {}  # of cells with the same problems
    for changes in [cell for block in blocks for cell in _product(block)]:
        where = f"cell {' '.join(changes)}".rstrip()
        try:
            layered = apply_layers(values, [*changes, *overrides], where)
            if any(_matches(layered, item) is False for item in only):
                continue  # before validation: problems of a deselected cell do not matter
            needs = _check_resources(layered.pop("resources", {}), where)
            config = check(layered, where)
        except CofimaError as error:
            _, _, lines = str(error).partition("\n")
            messages.setdefault(lines or str(error), []).append(str(error))
            continue
        if all(_matches(config.model_dump(mode="json"), item) for item in only):
            found.setdefault(name(config), (config, needs))
    if messages:
        raise CofimaError("\n".join(map(_in_one, messages.values())))
    if not found:
        raise CofimaError(f"{path}: no cell is left by --only {' '.join(only)}")
    return list(found.values())


def _in_one(messages: Sequence[str]) -> str:
    """Return one message for cells with the same problems: that of the first, and the number of others."""
    others = len(set(messages)) - 1
    more = f"\n  (so do {others} other cells)" if others > 1 else "\n  (so does another cell)"
    return messages[0] + (more if others else "")


def _check_resources(values: Any, where: str) -> Resources:
    if not isinstance(values, Mapping):
        raise problems(where, [f"resources: expected keys and values, found {values!r}"])
    try:
        return Resources.model_validate(values)
    except ValidationError as error:
        raise problems(where, validation_problems(error, Resources, "resources.")) from error


def name(config: Config) -> str:
    """Return the name of a cell's folder: the main settings, and a hash of all that affect the result."""
    return f"{plain_name(config)}-{json_digest(identity(config))[:8]}"


def identity(config: Config) -> dict[str, str]:
    """Return the settings that affect the result of a cell and differ from their defaults.

    Defaults are left out so that names stay stable when settings are added to the package. If a default has
    changed, resuming the run in the folder raises an error that says what differs.
    """
    return {key: value for key, value in changed(config).items() if key not in _UNNAMED}


def plain_name(config: Config) -> str:
    """Return a name composed of dataset, backbone, method and seed."""
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
    """Return a value as one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n...\n").strip()


def _matches(settings: Mapping[str, Any], item: str) -> bool | None:
    """Return True if a cell matches ``key=value[,value]``; None if the key is not set."""
    key, _, wanted = item.partition("=")
    value: Any = settings
    for part in key.strip().split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    texts = {str(value), json.dumps(value)}  # true and null as recipes write them
    return any(text.strip() in texts for text in wanted.split(","))
