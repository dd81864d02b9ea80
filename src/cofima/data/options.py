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
    """Share of each class used for testing, for data without a test set."""
    split_seed: int = 0
    """Seed of that split."""
    skip_unreadable: Annotated[bool, RECORDED] = False
    """Skip unreadable images, and classes without both training and test images, instead of failing."""
    max_train_per_class: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of training images per class."""
    max_test_per_class: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of test images per class; for trial runs, since accuracies become imprecise."""
    preset: Annotated[Preset | None, RECORDED] = None
    """Transforms; by default ``slca`` for the datasets of the paper, and ``timm`` for all others."""
    flip: bool | None = None
    """Random horizontal flips of training images; by default as the dataset and the preset say."""
    crop: Annotated[float, Field(gt=0, le=1)] | None = None
    """Minimum share of the area that a random training crop keeps; by default as the preset says."""
    root: Annotated[Path | None, MACHINE] = None
    """Parent of relative folders; by default $COFIMA_DATA, then the working directory."""
    layout: Annotated[str | None, SOURCE] = None
    """Layout of the copy to use if a dataset is found in several; by default the first one."""
    split_file: Annotated[Path | None, SOURCE] = None
    """File that defines the split: a manifest, two lists, or the names of the test images."""
