"""Plugins: methods and datasets in files outside the package, run only at the user's request.

A file is given by ``--plugin FILE``, by :func:`load`, or in ``$COFIMA_PLUGINS``, which child processes
inherit. An installed package registers its modules as entry points of the group ``cofima.plugins``.
"""

import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from cofima.core.atomic import file_digest
from cofima.core.errors import CofimaError, CofimaWarning, problems
from cofima.core.paths import expand

GROUP, ENVIRONMENT = "cofima.plugins", "COFIMA_PLUGINS"


@dataclass(frozen=True)
class Plugin:
    """Loaded plugin: a module that may define a method and datasets, and the hash of its file."""

    name: str
    module: ModuleType
    file: Path
    sha256: str


_loaded: dict[str, Plugin] = {}  # plugins requested by the user, by name


def load(file: str | Path) -> Plugin:
    """Run a Python file and register its method and datasets, in this process and in its children.

    Args:
        file: The file; its name without ``.py`` is the name of the method that it defines.

    Returns:
        The plugin. A file that is already loaded and unchanged is not run again.

    Raises:
        CofimaError: The file is missing, is not a valid plugin, or raises an exception.

    Example::

        cofima.plugins.load("my_method.py")
        cofima.learn("photos", method="my_method")
    """
    path = expand(file).resolve()
    problem = _problem(path)
    if problem:
        raise CofimaError(f"plugin {file}: {problem}")
    digest, known = file_digest(path), _loaded.get(path.stem)
    if known is not None and (known.file, known.sha256) == (path, digest):
        return known
    if known is not None and known.file != path:
        raise CofimaError(f"plugins {known.file} and {path} have the same name: rename one of the files")
    _loaded[path.stem] = Plugin(path.stem, _run(path), path, digest)
    known_files = [text for text in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if text]
    os.environ[ENVIRONMENT] = os.pathsep.join(dict.fromkeys([*known_files, str(path)]))
    return _loaded[path.stem]


def loaded() -> list[Plugin]:
    """Return all plugins: those requested by the user, and those of installed packages."""
    for file in os.environ.get(ENVIRONMENT, "").split(os.pathsep):
        if file and Path(file).stem not in _loaded:
            load(file)
    return [*_loaded.values(), *(plugin for plugin in _installed() if plugin.name not in _loaded)]


def records(names: Sequence[str]) -> list[dict[str, str]]:
    """Return the records of the named plugins, for a model folder that needs them."""
    return [{"name": p.name, "file": p.file.name, "sha256": p.sha256} for p in loaded() if p.name in names]


def require(folder: Path, needed: Sequence[Mapping[str, Any]]) -> None:
    """Raise if plugins of a model folder are not loaded; warn if one of their files has changed."""
    here = {plugin.name: plugin for plugin in loaded()}
    absent = [
        f"the plugin '{each['name']}' is not loaded: give --plugin PATH/{each['file']} "
        f"(sha256 {str(each['sha256'])[:12]}…), or cofima.core.plugins.load in Python"
        for each in needed
        if each["name"] not in here
    ]
    if absent:
        raise problems(f"{folder} was made with code that is not in it; it", absent)
    for each in needed:
        if here[each["name"]].sha256 != each["sha256"]:
            text = f"{here[each['name']].file} has changed since {folder} was made with it"
            warnings.warn(text, CofimaWarning, stacklevel=2)


def _problem(path: Path) -> str | None:
    if not path.is_file():
        return "there is no such file"
    if path.suffix != ".py":
        return "it is not a Python file"
    if not path.stem.isidentifier() or path.stem.startswith("_"):
        return f"its name is the method's, and '{path.stem}' cannot be one: letters, digits and _ only"
    return None


def _run(path: Path) -> ModuleType:
    name = f"cofima_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look up types there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        if isinstance(error, CofimaError):
            raise
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        at = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        where = f" line {at}" if at else ""
        raise CofimaError(f"plugin {path}{where}: {type(error).__name__}: {error}") from error
    return module


@cache
def _installed() -> tuple[Plugin, ...]:
    """Import the plugins of installed packages; warn about those that fail."""
    found = []
    for entry in entry_points(group=GROUP):
        try:
            found.append(_import(entry))
        except Exception as error:
            text = f"the plugin {entry.value} of an installed package cannot be loaded: {error}"
            warnings.warn(text, CofimaWarning, stacklevel=2)
    return tuple(found)


def _import(entry: EntryPoint) -> Plugin:
    module = entry.load()
    if not isinstance(module, ModuleType) or not module.__file__:
        raise TypeError("it must name a module in a file")
    return Plugin(entry.name, module, Path(module.__file__), file_digest(Path(module.__file__)))
