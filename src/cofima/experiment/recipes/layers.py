"""Recipes in layers: what one says for all, then for a dataset, for a backbone, for a method."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import yaml

from cofima.core.errors import CofimaError, problems

PARTS = ("dataset", "backbone", "method")  # each is laid over those before it

Check = Callable[[str], str | None]
"""Say what is wrong with the name of a dataset, a backbone or a method, or None."""


def override(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply ``key=value`` items, with dotted keys and YAML values, to nested values."""
    wrong = [f"'{item}': expected key=value" for item in overrides if "=" not in item]
    if wrong:
        raise problems("the command line", wrong)
    for item in overrides:
        key, _, text = item.partition("=")
        *parents, last = key.strip().split(".")
        place = values
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = {}
            place = place[parent]
        try:
            place[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise CofimaError(f"{item}: the value is not YAML ({error})") from error
    return values


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with those of ``more`` laid over them."""
    result = {key: merged(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in more.items():
        inner = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if inner else value
    return result


def flattened(
    values: Mapping[str, Any],
    overrides: Sequence[str],
    defaults: Mapping[str, str],
    checks: Mapping[str, Check],
    where: str,
) -> dict[str, Any]:
    """Lay the blocks of the chosen dataset, then of the backbone, then of the method over the rest.

    ``per_dataset``, ``per_backbone`` and ``per_method`` map names, or patterns with ``*``, to blocks. A
    block may hold blocks of the kinds after its own: they join the recipe's own of that kind.
    ``overrides`` are not applied, but they have the last word on what is chosen.
    """
    result = merged(values, {})
    for part in PARTS:
        blocks = result.pop(f"per_{part}", None) or {}
        wrong = list(_problems(part, blocks, checks[part]))
        if wrong:
            raise problems(where, wrong)
        name = str(override(merged(result, {}), overrides).get(part, defaults[part]))
        for pattern, block in blocks.items():
            if fnmatchcase(name, str(pattern)):
                result = merged(result, block or {})
    return result


def _problems(part: str, blocks: Any, check: Check) -> list[str]:
    """Return what is wrong with the blocks of a kind, whether they are chosen or not."""
    if not isinstance(blocks, Mapping):
        return [f"per_{part}: expected a block for each {part}, found {type(blocks).__name__}"]
    earlier = [f"per_{other}" for other in PARTS[: PARTS.index(part) + 1]]
    found = []
    for pattern, block in blocks.items():
        name, problem = f"per_{part}.{pattern}", None if "*" in str(pattern) else check(str(pattern))
        if problem:
            found.append(f"{name}: {problem}")
        if not isinstance(block, Mapping | None):
            found.append(f"{name}: expected keys and values, found {type(block).__name__}")
            continue
        found += [
            f"{name}.{key}: {part} blocks are laid over {key.removeprefix('per_')} blocks; put it outside"
            for key in earlier
            if key in (block or {})
        ]
    return found
