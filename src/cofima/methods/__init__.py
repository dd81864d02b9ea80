"""The folder is the registry: ``methods/coma.py`` is the method ``coma``."""

import inspect
import pkgutil
from dataclasses import fields
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter

from cofima.errors import CofimaError, did_you_mean
from cofima.methods.base import Method

__all__ = ["Method", "build", "find", "names", "options_of"]


def names() -> list[str]:
    """Return the names of all methods."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if name != "base" and not name.startswith("_"))


def find(name: str) -> type[Method]:
    """Return the class of a method, importing its file alone."""
    if name not in names():
        raise CofimaError(f"unknown method '{name}'{did_you_mean(name, names())}")
    module = import_module(f"{__name__}.{name}")
    classes = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Method) and member.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise TypeError(f"{module.__name__} must define one Method, found {[c.__name__ for c in classes]}")
    return classes[0]


def build(name: str, options: dict[str, Any] | None = None) -> Method:
    """Make a method with its options checked."""
    method: Method = TypeAdapter(find(name)).validate_python(options or {})
    return method


def options_of(method: Method) -> dict[str, Any]:
    """Return a method's options, defaults included, as JSON-able values."""
    dumped = TypeAdapter(type(method)).dump_python(method, mode="json")
    return {field.name: dumped[field.name] for field in fields(method)}
