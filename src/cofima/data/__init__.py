"""Datasets, streams of tasks, and transforms of images."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "Dataset",
    "ImageSet",
    "Sample",
    "Source",
    "Stream",
    "Task",
    "View",
    "dataset",
    "from_groups",
    "split",
]

# Imported when first asked for: `cofima.data.options` is read without torch.
_MODULES = {
    "Dataset": "stream",
    "ImageSet": "image_set",
    "Sample": "loading.loader",
    "Source": "sources.base",
    "Stream": "stream",
    "Task": "stream",
    "View": "transforms",
    "dataset": "sources.plugin",
    "from_groups": "stream",
    "split": "stream",
}

if TYPE_CHECKING:
    from cofima.data.image_set import ImageSet
    from cofima.data.loading.loader import Sample
    from cofima.data.sources.base import Source
    from cofima.data.sources.plugin import dataset
    from cofima.data.stream import Dataset, Stream, Task, from_groups, split
    from cofima.data.transforms import View
else:  # a type checker that saw this would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value
