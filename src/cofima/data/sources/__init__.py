"""Datasets on disk. The folder is the registry: ``sources/cub200.py`` defines the dataset ``cub200``.

Such a file defines ``INFO``, the published facts, and ``find_copies(root)``, which finds copies below a
folder.
"""

import pkgutil
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

from cofima.core.errors import CofimaError, CofimaWarning, did_you_mean
from cofima.core.progress import SILENT, Progress
from cofima.data.options import DataOptions
from cofima.data.sources.base import Copy, DatasetInfo, Source, search_roots
from cofima.data.sources.checks import checked, count_problem
from cofima.data.sources.split_file import split_by_file

__all__ = ["copies", "find", "info", "missing", "names"]

_HELPERS = {
    *("base", "checks", "foreign_code", "listing", "split_file", "unpickle"),  # shared code
    *("folder", "huggingface", "in_memory", "plugin", "torchvision"),  # sources with many datasets each
}


def names() -> list[str]:
    """Return the names of the datasets with a module in this package."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - _HELPERS)


def info(name: str) -> DatasetInfo:
    """Return the published facts about a dataset."""
    known: DatasetInfo = _module(name).INFO
    return known


def copies(name: str, root: Path | None) -> list[Copy]:
    """Return all copies of a dataset, the preferred one first; nothing is opened."""
    found: dict[tuple[str, Path], Copy] = {}
    for place in search_roots(root):
        for copy in _module(name).find_copies(place):
            found.setdefault((copy.layout, copy.path.resolve()), copy)
    return list(found.values())


def find(name: str, options: DataOptions, progress: Progress = SILENT) -> Source:
    """List the images of a dataset, split as the options say, and check the list.

    If there are several copies, the first is used, with a message; ``data.layout`` and ``data.root`` select
    another.
    """
    if problem := missing(name, options):
        raise CofimaError(problem)
    there = copies(name, options.root)
    copy = next(copy for copy in there if options.layout in (None, copy.layout))
    if len(there) > 1 and options.layout is None:
        others = "; ".join(f"{other.layout} in {other.path}" for other in there if other is not copy)
        choose = "choose with data.layout or data.root"
        progress.say(f"{name}: taking {copy.layout} in {copy.path}, not {others} ({choose})")
    source = copy.open()
    if options.split_file is not None:
        source = split_by_file(source, options.split_file)
    source.facts.update(layout=copy.layout, folder=str(copy.path.resolve()))
    source = checked(source, options, copy.path)
    if problem := count_problem(source, info(name)):
        warnings.warn(f"{copy.path}: {problem}", CofimaWarning, stacklevel=2)
    return source


def missing(name: str, options: DataOptions) -> str | None:
    """Return a message on the expected files and how to get them, or None if a copy was found."""
    known, there = info(name), copies(name, options.root)
    if options.layout is not None and options.layout not in known.layouts:
        hint = did_you_mean(options.layout, known.layouts)
        return f"data.layout = {options.layout}: {name} has no such layout{hint}"
    if any(options.layout in (None, copy.layout) for copy in there):
        return None
    wanted = [layout for layout in known.layouts if options.layout in (None, layout)]
    also = [f"{copy.layout} in {copy.path}" for copy in there]
    lines = [
        f"dataset {name} ({known.title}) was not found; one of these is expected",
        *(f"    {layout}: {known.layouts[layout]}" for layout in wanted),
        "  in one of",
        *(f"    {at}{'' if at.is_dir() else ' (no such folder)'}" for at in search_roots(options.root)),
        *([f"  There is only {'; '.join(also)}."] if also else []),
        f"  Get it from {known.url}, and give its place with --data-root or COFIMA_DATA.",
        *([f"  Or say: cofima data get {name}"] if known.download else []),
    ]
    return "\n".join(lines)


def _module(name: str) -> ModuleType:
    if name not in names():
        raise CofimaError(f"unknown dataset '{name}'{did_you_mean(name, names())}")
    return import_module(f"{__name__}.{name}")
