"""Schema of a configuration: all settings of a run with their defaults; imports no torch."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cofima.core.settings import MACHINE, RECORDED, REPEAT
from cofima.data.options import DataOptions
from cofima.models.options import ModelOptions
from cofima.training.options import TrainOptions

DEFAULT_METHOD = "cofima"


class StreamOptions(BaseModel):
    """Split of the classes into tasks."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    base_classes: Annotated[int, Field(ge=1)] = 2
    """Number of classes in the first task."""
    increment: Annotated[int, Field(ge=1)] = 2
    """Number of classes in each later task; the last one has the remainder."""
    groups: tuple[tuple[int | str, ...], ...] | None = None
    """Classes of each task, by name or number, instead of ``base_classes`` and ``increment``."""
    order_seed: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    """Seed of the class order, shuffled as in published orders; -1 keeps it, as vtab does; else ``seed``."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        fields = type(self).model_fields  # a stored configuration states the defaults too
        counted = ("base_classes", "increment", "order_seed")
        if self.groups is not None and any(getattr(self, key) != fields[key].default for key in counted):
            raise ValueError("give either groups, or base_classes, increment and order_seed")
        return self


class Config(BaseModel):
    """Configuration of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    method: str = DEFAULT_METHOD
    """Name of the method: see ``cofima list methods``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the method: see ``cofima show METHOD``."""
    dataset: Annotated[str, RECORDED] = "digits"
    """Name of the dataset: see ``cofima list datasets``."""
    data: DataOptions = Field(default_factory=DataOptions)
    backbone: Annotated[str, RECORDED] = "vit_micro"
    """Name of the pre-trained network: see ``cofima list backbones``."""
    model: ModelOptions = Field(default_factory=ModelOptions)
    stream: StreamOptions = Field(default_factory=StreamOptions)
    train: TrainOptions = Field(default_factory=TrainOptions)
    seed: Annotated[int, Field(ge=0, lt=2**32), REPEAT] = 1993
    """Random seed of class order, new head rows, batches, augmentation and alignment."""
    device: Annotated[str, MACHINE] = "auto"
    """Device; ``auto`` uses a GPU if there is one."""
    keep_checkpoints: Annotated[bool, MACHINE] = False
    """Keep the checkpoint after every task, not only after the last two."""
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Test on this held-out share of the training images instead of the test images, to choose settings."""
