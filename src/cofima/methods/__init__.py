"""The folder is the registry: ``methods/coma.py`` is the method ``coma``."""

import inspect
import pkgutil
from collections.abc import Collection
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter

from cofima.core import plugins
from cofima.core.errors import CofimaError, did_you_mean
from cofima.methods.base import Method
from cofima.training.context import Batch

NOT_METHODS = {"base", "components", "state"}

__all__ = ["Batch", "Method", "build", "fallback_for", "find", "first_task_key", "names", "options_of"]


def names() -> list[str]:
    """Return the names of all methods."""
    return sorted([*_packaged(), *_own()])


def find(name: str) -> type[Method]:
    """Return the class of a method, importing its file alone."""
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
    """Make a method with its options checked."""
    method: Method = TypeAdapter(find(name)).validate_python(options or {})
    return method


def fallback_for(entries: Collection[str]) -> str:
    """Return the method as which a model goes on of whose state these declared entries are left.

    Of the generic methods that need no others it is the one that needs the most.
    """
    needs = {
        name: {entry.name for entry in kind.state_schema}
        for name in names()
        if vars(kind := find(name)).get("is_fallback")
    }
    return max((name for name in needs if needs[name] <= set(entries)), key=lambda name: len(needs[name]))


def first_task_key(method: Method) -> tuple[Any, ...] | None:
    """Return all that a first task depends on, if the class itself says so; else None.

    What a base class says is not believed: it does not know what a class derived from it adds.
    """
    return method.first_task_key() if "first_task_key" in vars(type(method)) else None


def _packaged() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return [name for name in found if name not in NOT_METHODS and not name.startswith("_")]


def _own() -> dict[str, type[Method]]:
    """Return the methods of plugins: like those of the package, one a file, and named after it."""
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
    """Return the methods that a module defines itself."""
    members = [member for _, member in inspect.getmembers(module, inspect.isclass)]
    return [kind for kind in members if issubclass(kind, Method) and kind.__module__ == module.__name__]


def options_of(method: Method) -> dict[str, Any]:
    """Return a method's options, defaults included, as JSON-able values."""
    dumped = TypeAdapter(type(method)).dump_python(method, mode="json")
    return {field.name: dumped[field.name] for field in fields(method)}
