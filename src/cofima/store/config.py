"""The schema of a configuration: every setting of a run, with its default; imports no torch."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cofima.core.settings import MACHINE, RECORDED, REPEAT
from cofima.data.options import DataOptions
from cofima.models.options import ModelOptions
from cofima.training.options import TrainOptions

DEFAULT_METHOD = "cofima"


class StreamOptions(BaseModel):
    """Division of the classes into tasks."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    base_classes: Annotated[int, Field(ge=1)] = 2
    """Classes in the first task."""
    increment: Annotated[int, Field(ge=1)] = 2
    """Classes in each later task; the last takes the remainder."""
    groups: tuple[tuple[int | str, ...], ...] | None = None
    """Classes of each task, by name or number, instead of ``base_classes`` and ``increment``."""
    order_seed: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    """Shuffles the classes as published orders do; -1 leaves them in order, as vtab does; else ``seed``."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        fields = type(self).model_fields  # a stored configuration states the defaults too
        counted = ("base_classes", "increment", "order_seed")
        if self.groups is not None and any(getattr(self, key) != fields[key].default for key in counted):
            raise ValueError("give either groups, or base_classes, increment and order_seed")
        return self


class Config(BaseModel):
    """Everything that decides what a run computes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    method: str = DEFAULT_METHOD
    """The method: see ``cofima list methods``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The method's own options: see ``cofima show METHOD``."""
    dataset: Annotated[str, RECORDED] = "digits"
    """The dataset: see ``cofima list datasets``."""
    data: DataOptions = Field(default_factory=DataOptions)
    backbone: Annotated[str, RECORDED] = "vit_micro"
    """The pre-trained network: see ``cofima list backbones``."""
    model: ModelOptions = Field(default_factory=ModelOptions)
    stream: StreamOptions = Field(default_factory=StreamOptions)
    train: TrainOptions = Field(default_factory=TrainOptions)
    seed: Annotated[int, Field(ge=0, lt=2**32), REPEAT] = 1993
    """Decides class order, new head rows, batches, augmentation and alignment."""
    device: Annotated[str, MACHINE] = "auto"
    """Device; ``auto`` takes a GPU where there is one."""
    keep_checkpoints: Annotated[bool, MACHINE] = False
    """Keep the state after every task, not only after the last two."""
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Test on this share of the training images instead of the test images, to choose settings by."""
