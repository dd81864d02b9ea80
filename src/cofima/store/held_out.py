"""Stored features of held-out images, for measurements and calibration without the images."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Features of images that the backbone was not trained on, with their labels.

    Attributes:
        features: Features of the current backbone [images, width].
        labels: Index of each image's class, in the order of the logits.
        chose: True for images used for selection (early stopping, which model to keep): accuracy is not
            reported on them.
        taught: True for images that the head was fitted on: they must be predicted by leave-one-out.
        exact: True if the current backbone computed the features from the image; False if they were mapped
            from an earlier backbone, which is an estimate.
    """

    features: Tensor
    labels: Tensor
    chose: Tensor
    taught: Tensor
    exact: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index_or_mask: Tensor) -> "HeldOut":
        """Return the images at these indices, or where the mask is true."""
        return HeldOut(**{key: value[index_or_mask] for key, value in vars(self).items()})

    def join(self, other: "HeldOut") -> "HeldOut":
        """Return the concatenation of both."""
        mine, theirs = vars(self), vars(other)
        return HeldOut(**{key: torch.cat([value, theirs[key]]) for key, value in mine.items()})

    def without(self, label: int) -> "HeldOut":
        """Return the images of the other classes; labels above ``label`` decrease by one."""
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
        """Return all fields as contiguous tensors, for saving."""
        return {key: value.contiguous() for key, value in vars(self).items()}


def no_images(width: int) -> HeldOut:
    """Return an empty set of features."""
    none = torch.zeros(0, dtype=torch.bool)
    return HeldOut(torch.zeros(0, width), torch.zeros(0, dtype=torch.int64), none, none, none)
