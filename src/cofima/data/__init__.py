"""Images on disk become tasks: datasets, streams of tasks, transforms."""

from cofima.data.images import ImageSet
from cofima.data.own import dataset
from cofima.data.stream import Dataset, Stream, Task, from_groups, split
from cofima.data.views import View

__all__ = ["Dataset", "ImageSet", "Stream", "Task", "View", "dataset", "from_groups", "split"]
