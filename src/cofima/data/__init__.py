"""Datasets, streams of tasks, and transforms of images."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cofima.data.image_set import ImageSet as ImageSet
    from cofima.data.loading.loader import Sample as Sample
    from cofima.data.sources.base import Source as Source
    from cofima.data.sources.plugin import dataset as dataset
    from cofima.data.stream import Dataset as Dataset
    from cofima.data.stream import Stream as Stream
    from cofima.data.stream import Task as Task
    from cofima.data.stream import from_groups as from_groups
    from cofima.data.stream import split as split
    from cofima.data.transforms import View as View
else:  # imported when first used, since `cofima.data.options` is read without torch
    _MODULES = {"ImageSet": "image_set", "Sample": "loading.loader", "Source": "sources.base"}
    _MODULES |= {"View": "transforms", "dataset": "sources.plugin"}
    _MODULES |= dict.fromkeys(("Dataset", "Stream", "Task", "from_groups", "split"), "stream")
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value
