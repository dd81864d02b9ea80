"""Closed-form heads: solved from sums over all images, without drawn features or epochs."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from cofima.core.errors import CofimaError
from cofima.core.seeds import Seeds
from cofima.methods.components.discriminant import (
    Priors,
    SharedGaussians,
    Space,
    choose_shrinkage,
    discriminant,
    leave_one_out_losses,
    oas,
)
from cofima.methods.components.projection import ProjectedHead, RidgeSums, best_ridge
from cofima.methods.state import Entry
from cofima.models.head import Head, PowerHead

Shrinkage = Annotated[float, Field(gt=0, le=1)] | Literal["oas", "loo"]


class ClosedFormOptions(BaseModel):
    """Options of closed-form heads."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    priors: Priors = "equal"
    """For lda: class priors, all equal or proportional to the number of images (counts)."""
    shrinkage: Shrinkage = "loo"
    """For lda: share of the identity in the covariance; by formula (oas), or leave-one-out loss (loo)."""
    features: Space = "raw"
    """For lda: features as the backbone gives them (raw), or their signed roots at unit length (power)."""
    projection: Annotated[int, Field(ge=1)] = 10_000
    """For ridge: number of hidden features."""
    ridge: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """For ridge: regularization strength; auto: best on a held-out fifth of each task's training images."""


def shrink(
    gaussians: SharedGaussians, features: Tensor, labels: Tensor, how: ClosedFormOptions, classifier: str
) -> str:
    """Set the shrinkage after a task with these images; return a description of the choice.

    Leave-one-out losses of earlier tasks are included. They are losses of a discriminant and say nothing
    about other heads, which use the formula (oas) instead.
    """
    if how.shrinkage == "loo" and classifier == "lda":
        losses = leave_one_out_losses(gaussians, features, labels, how.priors)
        if losses is not None:
            gaussians.losses = gaussians.losses + losses
        gaussians.shrinkage = choose_shrinkage(gaussians, gaussians.losses)
        left_out = "left out" if gaussians.losses.any() else "computed: no image can be left out"
        return f"shrinkage {gaussians.shrinkage:.3g}, {left_out}"
    if isinstance(how.shrinkage, float):
        gaussians.shrinkage = how.shrinkage
        return f"shrinkage {how.shrinkage:g}"
    gaussians.shrinkage = oas(gaussians.within, gaussians.degrees + len(gaussians))
    return f"shrinkage {gaussians.shrinkage:.3g}, computed"


def discriminant_head(gaussians: SharedGaussians, how: ClosedFormOptions, sizes: Sequence[int]) -> Head:
    """Return the head of linear discriminant analysis."""
    head = empty_head(gaussians.width, sizes, gaussians.space)
    head.load_flat(*discriminant(gaussians, how.priors))
    return head


def empty_head(width: int, sizes: Sequence[int], space: Space) -> Head:
    """Return a head for features in this space, without weights yet."""
    return PowerHead(width, sizes) if space == "power" else Head(width, sizes)


class RidgeReadout:
    """Ridge regression on randomly projected features, over all images so far."""

    def __init__(self, features: int, how: ClosedFormOptions, seeds: Seeds) -> None:
        self.blank = ProjectedHead(features, how.projection, seeds.generator("projection"))
        self.how, self.seeds = how, seeds
        self.clear()

    def clear(self) -> None:
        """Reset the sums over images; the projection is kept."""
        self.sums, self.chosen, self.judges = RidgeSums.empty(self.how.projection), 1.0, 2

    def add(self, features: Tensor, labels: Tensor, classes: int, task: int) -> str:
        """Add a task's images and select the ridge on them; return a description of the choice.

        A task with fewer classes than the one that selected the ridge does not change it: its choice would
        suit only these few classes, and a single class leaves nothing to tell apart.
        """
        self.sums.add_images(self.blank, features, labels, classes)
        mine = len(torch.unique(labels))
        if self.how.ridge != "auto":
            self.chosen = self.how.ridge
        elif mine >= self.judges:
            self.judges = mine
            self.chosen = best_ridge(self.blank, features, labels, self.seeds.generator("ridge", task))
        return f"ridge {self.chosen:g}"

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the regression; the ridge is increased until it can be solved."""
        weight, self.chosen = self.sums.solve(self.chosen)
        return weight, torch.zeros(len(weight))

    def solved(self, sizes: Sequence[int]) -> ProjectedHead:
        """Return a head with the weights of the regression."""
        head = self.blank.with_blocks(sizes)
        head.load_flat(*self.solve())
        return head

    def state(self) -> dict[str, Tensor]:
        """Return the sums and the ridge, and a few elements of the projection to verify it."""
        ridge, judges = torch.tensor(self.chosen, dtype=torch.float64), torch.tensor(self.judges)
        return vars(self.sums) | {"ridge": ridge, "judges": judges, "projection": self.blank.sample()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the sums; raise if they were computed with another projection."""
        if not torch.equal(state["projection"], self.blank.sample()):
            raise CofimaError("this version of torch draws another random projection from the same seed")
        self.sums, self.chosen = RidgeSums(state["packed"], state["cross"]), float(state["ridge"])
        self.judges = int(state["judges"])


READOUT = (
    Entry("readout.packed", keeps_removed="the sums of the regression include its images, as of no class"),
    Entry("readout.cross", axis="class", dim=1),
    Entry("readout.ridge"),
    Entry("readout.judges"),
    Entry("readout.projection", predicts="a random projection"),
)
