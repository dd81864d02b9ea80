"""Training options; torch-free, since reports read them too."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LoraOptions(BaseModel):
    """Options of LoRA: low-rank updates of the backbone."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    rank: Annotated[int, Field(ge=0)] | None = None
    """Rank of a layer's update in a task; 0, the default of most methods, trains the full backbone."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The product of the factors is scaled by ``alpha / rank``; by default it is not scaled."""
    layers: Literal["all", "attention"] = "all"
    """Layers that are adapted: all linear layers and ungrouped convolutions, or only those of attention."""

    @property
    def scale(self) -> float:
        """Scale of the product of the factors."""
        return self.alpha / self.rank if self.alpha and self.rank else 1.0

    def over(self, default: "LoraOptions") -> "LoraOptions":
        """Return these options, with values of ``default`` for those that are not given."""
        return default.model_copy(update={key: value for key, value in self if value is not None})


class TrainOptions(BaseModel):
    """Training options of a task. The defaults are the paper's for CIFAR-100."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    epochs: Annotated[int, Field(ge=0)] = 20
    """Epochs per task."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """Images per step; also per forward pass when features, Fisher information or accuracies are computed."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of the head."""
    backbone_lr_scale: Annotated[float, Field(ge=0)] = 0.01
    """Backbone learning rate relative to ``lr``; 0.01: slow learner, 1: plain fine-tuning, 0: frozen."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD, reset for each task."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Weight decay of all trained parameters."""
    schedule: Literal["steps", "cosine"] = "steps"
    """Decay of both learning rates: by ``gamma`` at each milestone, or along a cosine to 0, per epoch."""
    milestones: tuple[int, ...] | None = None
    """Epochs after which both learning rates are multiplied by ``gamma``; by default at 90% of the epochs."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor applied to the learning rates at each milestone."""
    head_init: Literal["random", "lda"] = "random"
    """New head rows before training: small random numbers, or a discriminant of the task's features (lda)."""
    batchnorm: Literal["train", "frozen"] = "train"
    """frozen, always used with LoRA, keeps the running statistics, which new classes alone would distort."""
    freeze_backbone_on_single_class: bool = False
    """Train only the head in a task that adds a single class."""
    balance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Oversampling of rare classes: an image is seen (size of largest class / of its class)^balance times."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Epochs without a lower held-out loss before training stops (``cofima learn`` and ``extend`` only)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 trains faster on GPUs; Fisher information and averages are always float32."""
    lora: LoraOptions = Field(default_factory=LoraOptions)

    @model_validator(mode="after")
    def _milestones_are_reached(self) -> Self:
        if self.milestones and self.schedule == "cosine":
            raise ValueError("milestones are of schedule=steps: leave them out, or the cosine")
        late = [m for m in self.milestones or () if not 0 < m < self.epochs]
        if late:
            raise ValueError(f"milestones {late} are not within the {self.epochs} epochs")
        return self

    @property
    def decays(self) -> list[int]:
        """Epochs after which the learning rates are reduced."""
        return [round(0.9 * self.epochs)] if self.milestones is None else list(self.milestones)
