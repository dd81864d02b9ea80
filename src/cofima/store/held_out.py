"""Features that measure and calibrate a model later, when its photographs are gone."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Features of images that the backbone was not trained on, with their labels.

    Attributes:
        features: As the backbone computes them [images, width].
        labels: The place of each image's class in the order of the logits.
        chose: True for images that decided something (when to stop, which model to keep): no accuracy is
            reported on them.
        taught: True where the head was made from the image too: it must be left out to answer it.
        exact: True where the present backbone computed the features from the image; False where they were
            moved along with a backbone that changed, by an estimate.
    """

    features: Tensor
    labels: Tensor
    chose: Tensor
    taught: Tensor
    exact: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index_or_mask: Tensor) -> "HeldOut":
        """Return the images at these places, or where the mask is true."""
        return HeldOut(**{key: value[index_or_mask] for key, value in vars(self).items()})

    def join(self, other: "HeldOut") -> "HeldOut":
        """Return the images of both."""
        mine, theirs = vars(self), vars(other)
        return HeldOut(**{key: torch.cat([value, theirs[key]]) for key, value in mine.items()})

    def without(self, label: int) -> "HeldOut":
        """Return the images of the other classes, whose labels move up."""
        others = self.select(self.labels != label)
        return replace(others, labels=others.labels - (others.labels > label).long())

    def at_most(self, each: int) -> "HeldOut":
        """Return the last ``each`` images of every class."""
        rank = torch.zeros_like(self.labels)
        for label in torch.unique(self.labels):
            mine = (self.labels == label).nonzero().flatten()
            rank[mine] = torch.arange(len(mine) - 1, -1, -1)
        return self.select(rank < each)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything as tensors that can be saved."""
        return {key: value.contiguous() for key, value in vars(self).items()}


def no_images(width: int) -> HeldOut:
    """Return the features of no image."""
    none = torch.zeros(0, dtype=torch.bool)
    return HeldOut(torch.zeros(0, width), torch.zeros(0, dtype=torch.int64), none, none, none)
