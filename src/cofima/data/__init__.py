"""Datasets, streams of tasks, and transforms of images.

The names are imported when they are first used: ``cofima.data.options`` is read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cofima.data.images import ImageSet
    from cofima.data.loading.loader import Picture
    from cofima.data.sources.base import Source
    from cofima.data.sources.plugin import dataset
    from cofima.data.stream import Dataset, Stream, Task, from_groups, split
    from cofima.data.views import View

__all__ = [
    "Dataset",
    "ImageSet",
    "Picture",
    "Source",
    "Stream",
    "Task",
    "View",
    "dataset",
    "from_groups",
    "split",
]

_MODULES = {
    "images": ("ImageSet",),
    "loading.loader": ("Picture",),
    "sources.base": ("Source",),
    "sources.plugin": ("dataset",),
    "stream": ("Dataset", "Stream", "Task", "from_groups", "split"),
    "views": ("View",),
}


def __getattr__(name: str) -> Any:
    for module, members in _MODULES.items():
        if name in members:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
