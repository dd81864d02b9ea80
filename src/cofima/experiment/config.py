"""Reading and validation of configurations: YAML recipes and command-line overrides."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from cofima import methods
from cofima.core import plain_yaml
from cofima.core.errors import CofimaError, did_you_mean, file_error, problems
from cofima.core.names import shortened
from cofima.core.paths import exists
from cofima.core.settings import flat
from cofima.data import datasets
from cofima.data.datasets import DataOptions
from cofima.experiment.recipes.layers import PARTS, Check, apply_blocks, deep_merge, override
from cofima.models import backbone
from cofima.store.config import Config

OF_GRIDS = ("grid", "resources")  # keys of a recipe that are not part of a run's configuration
PAPER = "table1.yaml"  # the recipe of the paper's protocol


def read(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, or a packaged recipe by name, apply ``key=value`` overrides, and validate it."""
    return resolve(read_values(path), overrides, str(path))


def read_values(path: str | Path) -> dict[str, Any]:
    """Read a YAML file, or a packaged recipe by name, merged over the recipe that it extends, if any.

    ``extends`` names a file in the same folder, or a packaged recipe. A ``grid`` replaces that of the base.
    """
    file = _find(Path(path))
    values = _read_file(file)
    base, seen = values.pop("extends", None), [file]
    while base is not None:
        beside = file.parent / str(base)
        file = beside if exists(beside) and beside.is_file() else _find(Path(str(base)))
        if file in seen:
            raise CofimaError(f"{seen[0]}: extends goes in a circle, by way of {file}")
        seen.append(file)
        older = _read_file(file)
        base = older.pop("extends", None)
        values = deep_merge(older | ({"grid": None} if "grid" in values else {}), values)
    return values


def _read_file(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > 4 * plain_yaml.MOST_CHARACTERS:
            raise plain_yaml.YamlError(f"{file.stat().st_size:,} bytes are too many for a recipe")
        values = plain_yaml.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise file_error(file, error) from error
    except (plain_yaml.YamlError, UnicodeDecodeError) as error:
        raise CofimaError(f"{file} is not YAML: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise CofimaError(f"{file}: expected keys and values, found {type(values).__name__}")
    return values or {}


def resolve(values: Mapping[str, Any], overrides: Sequence[str], where: str) -> Config:
    """Apply the blocks of a recipe and the overrides, and validate the result.

    In order of increasing precedence: the defaults, the recipe, its ``per_dataset``, ``per_backbone`` and
    ``per_method``, and the overrides.
    """
    layered = apply_layers(values, overrides, where)
    return check({key: value for key, value in layered.items() if key not in OF_GRIDS}, where)


def apply_layers(values: Mapping[str, Any], overrides: Sequence[str], where: str) -> dict[str, Any]:
    """Apply blocks and overrides as :func:`resolve` does; only the names of the blocks are validated."""
    defaults = {part: Config.model_fields[part].default for part in PARTS}
    return override(apply_blocks(values, overrides, defaults, _checks(), where), overrides)


def check(values: Mapping[str, Any], where: str = "the configuration") -> Config:
    """Validate a configuration; one error lists all problems, each with a hint."""
    found: list[str] = []
    values = dict(values)
    options = values.pop("options", None) or {}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        found += validation_problems(error, Config)
        config = Config.model_construct(**{k: v for k, v in values.items() if k in Config.model_fields})
    found += [line for line in _names(config) if line]
    resolved = _options(config.method, options, found)
    if not found:
        found += _train(config)
    if found:
        raise problems(where, found)
    return config.model_copy(update={"options": resolved})


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line per value that differs between two resolved configurations."""
    a, b = flat(old), flat(new)
    keys = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
    return [f"{key}: {a.get(key, 'not set')} before, {b.get(key, 'not set')} now" for key in keys]


def changed(config: Config) -> dict[str, str]:
    """Return the settings that differ from the defaults, and always dataset, backbone, method and seed."""
    kind = cast(Hashable, methods.find(config.method))  # mypy mistakes the instances' hash for its own
    usual, own = _usual(config.method, kind), flat(config.model_dump(mode="json"))
    shown = {key: own[key] for key in (*PARTS, "seed")}
    return shown | {key: value for key, value in own.items() if usual.get(key) != value}


@cache
def _usual(name: str, kind: Hashable) -> dict[str, str]:
    """Return the defaults of all settings for a method.

    ``kind``, the method's class, is only a cache key: a plugin may replace the class of a name.
    """
    defaults = Config(method=name).model_dump(mode="json")
    return flat(defaults | {"options": methods.options_of(methods.build(name))})


def as_overrides(config: Config) -> list[str]:
    """Return the command-line overrides that reproduce this configuration."""
    return [f"{key}={value}" for key, value in changed(config).items()]


@cache
def paper_settings(dataset: str, backbone: str, method: str) -> dict[str, Any]:
    """Return the settings of the paper's protocol; without options for a method that is not packaged."""
    known = method in methods.names()
    chosen = [f"dataset={dataset}", f"backbone={backbone}", *([f"method={method}"] if known else [])]
    settings = read(PAPER, chosen).model_dump(mode="json") | {"method": method}
    return settings if known else settings | {"options": {}}


def recipes() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(
        f.name for f in resources.files("cofima.experiment.recipes").iterdir() if f.name.endswith(".yaml")
    )


def recipe_text(name: str) -> str:
    """Return the text of a packaged recipe, with its comments."""
    return resources.files("cofima.experiment.recipes").joinpath(name).read_text(encoding="utf-8")


def _find(path: Path) -> Path:
    if exists(path) and path.is_file():
        return path
    packaged = Path(str(resources.files("cofima.experiment.recipes"))) / f"{path.stem}.yaml"
    if packaged.is_file() and path.suffix in ("", ".yaml") and path.parent.name in ("", "recipes"):
        return packaged
    raise CofimaError(f"no configuration file {path}{did_you_mean(path.name, recipes())}")


def _checks() -> dict[str, Check]:
    """Return the functions that validate the names of blocks."""
    known = set(datasets.names())

    def dataset(name: str) -> str | None:
        if name in known or ":" in name:  # a path need not exist unless it is selected
            return None
        return f"unknown dataset{did_you_mean(name, known)}"

    def method(name: str) -> str | None:
        return None if name in methods.names() else f"unknown method{did_you_mean(name, methods.names())}"

    return {"dataset": dataset, "backbone": backbone.check, "method": method}


def _names(config: Config) -> list[str | None]:
    """Return the problems of names that the schema cannot validate."""
    data = config.data if isinstance(config.data, DataOptions) else DataOptions()
    return [
        datasets.check(config.dataset, data.root) if isinstance(config.dataset, str) else None,
        backbone.check(config.backbone) if isinstance(config.backbone, str) else None,
    ]


def _options(method: str, options: Any, found: list[str]) -> dict[str, Any]:
    """Return a method's options as JSON-serializable values, including defaults."""
    if method not in methods.names():
        found.append(f"method = {method}: unknown method{did_you_mean(str(method), methods.names())}")
        return {}
    kind = methods.find(method)
    try:
        return methods.options_of(methods.schema(kind).validate_python(options))
    except ValidationError as error:
        found += validation_problems(error, kind, "options.")
        return {}


def _train(config: Config) -> list[str]:
    """Return the reason why the method cannot be trained as configured, if any."""
    try:
        methods.find(config.method).check_train(config.train)
    except CofimaError as error:
        return [str(error)]
    return []


def validation_problems(error: ValidationError, owner: Any, prefix: str = "") -> list[str]:
    """Return each problem as ``key = value: problem``, with the alternatives of a union on one line."""
    lines: dict[str, str] = {}
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        fields = _fields(owner, place)
        key = prefix + ".".join(place[: len(fields)] or place)
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            parents = ".".join(place[:-1])
            full = [f"{prefix}{parents}.{name}" if parents else f"{prefix}{name}" for name in fields[-1]]
            key = prefix + ".".join(place)
            text = f"unknown key{did_you_mean(key, full)}"
        else:
            text = problem["msg"].removeprefix("Value error, ")
            text = text[0].lower() + text[1:]
        given = problem["input"]
        shown = (key or "it") if isinstance(given, dict | list) else f"{key} = {_text(given)}"
        lines[shown] = f"{lines[shown]}, or {text}" if shown in lines else f"{shown}: {text}"
    return list(lines.values())


def _text(value: object) -> str:
    try:
        return shortened(str(value))
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return type(value).__name__


def _fields(owner: Any, place: list[str]) -> list[list[str]]:
    """Return the known names at each level that ``place`` passes through."""
    levels: list[list[str]] = []
    for part in place:
        fields = getattr(owner, "model_fields", None) or getattr(owner, "__dataclass_fields__", None)
        if not fields:
            break
        levels.append(list(fields))
        field = fields.get(part)
        if field is None:
            break
        owner = getattr(field, "annotation", None) or getattr(field, "type", None)
    return levels or [[]]
