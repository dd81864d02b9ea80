"""Registry of methods: the folder itself. ``methods/coma.py`` defines the method ``coma``."""

import inspect
import pkgutil
from collections.abc import Collection, Hashable
from dataclasses import fields
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, cast

from pydantic import TypeAdapter

from cofima.core import plugins
from cofima.core.errors import CofimaError, did_you_mean
from cofima.methods.base import Method
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.state import Entry
from cofima.training.context import Batch

NOT_METHODS = {"base", "components", "state"}

__all__ = [
    "Batch",
    "Cost",
    "Entry",
    "Method",
    "Plan",
    "build",
    "fallback_for",
    "find",
    "first_task_key",
    "names",
    "options_of",
    "schema",
]


def names() -> list[str]:
    """Return the names of all methods."""
    return sorted([*_packaged(), *_own()])


def find(name: str) -> type[Method]:
    """Return the class of a method, without importing the others."""
    if name not in names():
        raise CofimaError(f"unknown method '{name}'{did_you_mean(name, names())}")
    if name not in _packaged():
        return _own()[name]
    module = import_module(f"{__name__}.{name}")
    classes = _classes(module)
    if len(classes) != 1:
        raise TypeError(f"{module.__name__} must define one Method, found {[c.__name__ for c in classes]}")
    return classes[0]


def build(name: str, options: dict[str, Any] | None = None) -> Method:
    """Return a method with validated options."""
    return schema(find(name)).validate_python(options or {})


def schema(kind: type[Method]) -> TypeAdapter[Method]:
    """Return the adapter that validates and dumps the options of a method."""
    return _schema(cast("Hashable", kind))  # every class is hashable; mypy looks at its instances


@lru_cache(maxsize=100)  # building the adapter takes longer than validating any options with it
def _schema(kind: Any) -> TypeAdapter[Method]:
    return TypeAdapter(kind)


def fallback_for(entries: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Return the method and options with which a model can continue when only these entries are left.

    Among the methods marked ``is_fallback`` whose entries are all available, the one that uses the most.
    """
    kinds = {name: kind for name in names() if vars(kind := find(name)).get("is_fallback")}
    needs = [
        (name, options, {entry.name for entry in build(name, options).entries()})
        for name, kind in kinds.items()
        for options in kind.fallback_options
    ]
    fit = [one for one in needs if one[2] <= set(entries)]
    name, options, _ = max(fit, key=lambda one: len(one[2]))
    return name, options


def first_task_key(method: Method) -> tuple[Any, ...] | None:
    """Return the method's key of the first task if its own class defines one, otherwise None.

    An inherited key does not count: the base class does not know which options a subclass adds.
    """
    return method.first_task_key() if "first_task_key" in vars(type(method)) else None


def _packaged() -> list[str]:
    return _modules(tuple(__path__))


@cache  # called thousands of times by a grid
def _modules(path: tuple[str, ...]) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(path) if module.name not in NOT_METHODS]


def _own() -> dict[str, type[Method]]:
    """Return the methods of plugins by name: one per file, named after the file."""
    found: dict[str, type[Method]] = {}
    for plugin in plugins.loaded():
        classes = _classes(plugin.module)
        if len(classes) > 1:
            names = ", ".join(kind.__name__ for kind in classes)
            raise CofimaError(f"plugin {plugin.file} defines several methods ({names}): one a file, please")
        if classes and plugin.name in _packaged():
            raise CofimaError(f"plugin {plugin.file}: '{plugin.name}' is a method of cofima; rename the file")
        if classes:
            found[plugin.name] = classes[0]
    return found


def _classes(module: ModuleType) -> list[type[Method]]:
    """Return the methods defined in a module, not those imported into it."""
    members = [member for _, member in inspect.getmembers(module, inspect.isclass)]
    return [kind for kind in members if issubclass(kind, Method) and kind.__module__ == module.__name__]


def options_of(method: Method) -> dict[str, Any]:
    """Return a method's options, including defaults, as JSON-serializable values."""
    dumped = schema(type(method)).dump_python(method, mode="json")
    return {field.name: dumped[field.name] for field in fields(method)}
