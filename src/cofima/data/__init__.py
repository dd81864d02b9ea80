"""Datasets, streams of tasks, and transforms; exports the names that plugins need."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cofima.data.loading.loader import Sample as Sample
    from cofima.data.sources.base import Source as Source
    from cofima.data.sources.plugin import dataset as dataset
    from cofima.data.stream import Task as Task
else:  # imported lazily, since `cofima.data.options` must not import torch
    _MODULES = {"Sample": "loading.loader", "Source": "sources.base"}
    _MODULES |= {"Task": "stream", "dataset": "sources.plugin"}
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value
