"""Options of the training of a task; torch-free, since reports read them too."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LoraOptions(BaseModel):
    """Options of LoRA: the backbone moves by products of small factors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    rank: Annotated[int, Field(ge=0)] | None = None
    """Rank of a layer's change in a task; 0, for most methods the default, trains the whole backbone."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The product of the factors counts ``alpha / rank`` times; by default once."""
    layers: Literal["all", "attention"] = "all"
    """Layers that move: all linear ones and ungrouped convolutions, or those of attention alone."""

    @property
    def scale(self) -> float:
        """Return the factor of the product."""
        return self.alpha / self.rank if self.alpha and self.rank else 1.0

    def over(self, default: "LoraOptions") -> "LoraOptions":
        """Return these options, with those of ``default`` where nothing is given."""
        return default.model_copy(update={key: value for key, value in self if value is not None})


class TrainOptions(BaseModel):
    """Options of the training of a task. The defaults are the paper's for CIFAR-100."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    epochs: Annotated[int, Field(ge=0)] = 20
    """Passes over a task's images."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """Images per step; also per forward pass when features, Fisher information or accuracies are computed."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of the head."""
    backbone_lr_scale: Annotated[float, Field(ge=0)] = 0.01
    """The backbone learns at ``lr`` times this; 0.01 is the slow learner, 1 plain fine-tuning, 0 frozen."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD, new for each task."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Weight decay of everything that is trained."""
    schedule: Literal["steps", "cosine"] = "steps"
    """Decay of both rates: by ``gamma`` at each milestone, or along a cosine to 0, epoch by epoch."""
    milestones: tuple[int, ...] | None = None
    """Epochs after which both rates are multiplied by ``gamma``; by default at nine tenths."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of the learning rates at each milestone."""
    batchnorm: Literal["train", "frozen"] = "train"
    """frozen, as always with LoRA, keeps running statistics, which few classes would spoil for all others."""
    freeze_backbone_on_single_class: bool = False
    """Train only the head in a task that adds a single class."""
    balance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Repetition of rare classes: an image is seen (largest class / its class) to this power times."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop when held-out images got no better for so many epochs (``cofima learn`` and ``extend`` only)."""
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
        """Return the epochs after which the learning rates fall."""
        return [round(0.9 * self.epochs)] if self.milestones is None else list(self.milestones)
