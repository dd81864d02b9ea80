"""Options of a dataset; imports no torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cofima.core.settings import MACHINE, RECORDED, SOURCE

Preset = Literal["slca", "pilot", "timm"]


class DataOptions(BaseModel):
    """Options for reading and splitting a dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of each class that is tested on, for data without a test part of its own."""
    split_seed: int = 0
    """Seed that chooses the images of that share."""
    skip_unreadable: Annotated[bool, RECORDED] = False
    """Leave out unreadable images and one-sided classes instead of refusing the folder."""
    max_train_per_class: Annotated[int, Field(ge=1)] | None = None
    """At most so many training images of each class."""
    max_test_per_class: Annotated[int, Field(ge=1)] | None = None
    """At most so many test images of each class: for a trial, since accuracies of few images say little."""
    preset: Annotated[Preset | None, RECORDED] = None
    """Whose transforms; if not given, ``slca`` for the datasets of the paper, and ``timm`` for all others."""
    flip: bool | None = None
    """Mirror training images; as the dataset and the preset say, if not given."""
    crop: Annotated[float, Field(gt=0, le=1)] | None = None
    """Least share of the area that a random training crop keeps; as the preset says, if not given."""
    root: Annotated[Path | None, MACHINE] = None
    """Parent of relative folders; by default $COFIMA_DATA, then the working directory."""
    layout: Annotated[str | None, SOURCE] = None
    """Layout of the copy to take where a dataset is found in several; the first one, if not given."""
    split_file: Annotated[Path | None, SOURCE] = None
    """Says what is trained and tested on: a manifest, two lists, or the names of the test images."""
