"""Layers of a recipe: general settings, then blocks per dataset, backbone and method."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

from cofima.core import plain_yaml
from cofima.core.errors import CofimaError, problems
from cofima.core.names import shortened

PARTS = ("dataset", "backbone", "method")  # later blocks override earlier ones

Check = Callable[[str], str | None]
"""Function that returns the problem of a dataset, backbone or method name, or None."""


def override(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply ``key=value`` items, with dotted keys and YAML values, to nested values in place."""
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
            place[last] = plain_yaml.parse(text)
        except plain_yaml.YamlError as error:
            raise CofimaError(f"{shortened(item)}: the value is not YAML ({error})") from error
    return values


def deep_merge(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested values, overridden by those of ``more``."""
    result = {
        key: deep_merge(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()
    }
    for key, value in more.items():
        inner = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = deep_merge(result[key], value) if inner else value
    return result


def apply_blocks(
    values: Mapping[str, Any],
    overrides: Sequence[str],
    defaults: Mapping[str, str],
    checks: Mapping[str, Check],
    where: str,
) -> dict[str, Any]:
    """Override general settings by the blocks of the chosen dataset, then backbone, then method.

    ``per_dataset``, ``per_backbone`` and ``per_method`` map names, or patterns with ``*``, to blocks. A
    block may contain blocks of later kinds, which are merged with the recipe's blocks of that kind.
    ``overrides`` are not applied, but take precedence in the choice of dataset, backbone and method.
    """
    result = dict(values)
    for part in PARTS:
        blocks = result.pop(f"per_{part}", None) or {}
        wrong = list(_problems(part, blocks, checks[part]))
        if wrong:
            raise problems(where, wrong)
        # only the items that choose the name are parsed, for speed: a grid has hundreds of cells
        own = [item for item in overrides if item.partition("=")[0].strip().partition(".")[0] == part]
        chosen = override(deepcopy({part: result.get(part, defaults[part])}), own)
        for pattern, block in blocks.items():
            if fnmatchcase(str(chosen[part]), str(pattern)):
                result = deep_merge(result, block or {})
    return deep_merge(result, {})


def _problems(part: str, blocks: Any, check: Check) -> list[str]:
    """Return the problems of all blocks of a kind, chosen or not."""
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
            f"{name}.{key}: {part} blocks override {key.removeprefix('per_')} blocks; put it outside"
            for key in earlier
            if key in (block or {})
        ]
    return found
