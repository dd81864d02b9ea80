"""Datasets, streams of tasks, and transforms of images; here are the names that plugins import."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cofima.data.loading.loader import Sample as Sample
    from cofima.data.sources.base import Source as Source
    from cofima.data.sources.plugin import dataset as dataset
    from cofima.data.stream import Task as Task
else:  # imported when first used, since `cofima.data.options` is read without torch
    _MODULES = {"Sample": "loading.loader", "Source": "sources.base"}
    _MODULES |= {"Task": "stream", "dataset": "sources.plugin"}
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value
