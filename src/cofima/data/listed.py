"""Images that are in memory, as a source."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from cofima.data.images import ImageSet
from cofima.data.source import Picture, Source
from cofima.data.stream import Dataset


def listed(dataset: Dataset) -> Source:
    """Return images that are in memory as a source."""

    def pictures(images: ImageSet) -> list[Picture]:
        return [
            Picture(str(row), label, partial(_pixels, images, place))
            for place, (row, label) in enumerate(images.named())
        ]

    variant = dataset.facts["split_id"].rpartition(":")[2]
    parts = pictures(dataset.train), pictures(dataset.test)
    return Source(
        dataset.name, variant, dataset.class_names, *parts, dataset.flip, dataset.crop, dataset.facts
    )


def _pixels(images: ImageSet, place: int) -> NDArray[np.uint8]:
    pixels, _ = images.batch(torch.tensor([place]))
    return pixels[0].permute(1, 2, 0).contiguous().numpy()
