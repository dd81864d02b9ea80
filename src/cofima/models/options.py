"""Options of the backbone; imports no torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cofima.core.settings import RECORDED

Layers = Literal["last", "all", "balanced"]


class ModelOptions(BaseModel):
    """Source of a backbone's weights, and its image size."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    pretrained: bool = True
    """Load the published weights (from package data or the hub); false starts from scratch."""
    checkpoint: Annotated[Path | None, RECORDED] = None
    """A local .safetensors, .pth, .pth.tar or .npz file, instead of the published weights."""
    img_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Image size in pixels; by default the backbone's own."""
    final_norm: Literal["pretrained", "reset"] = "pretrained"
    """Keep the pre-trained final layer norm, or reset it as SLCA's released code does."""
    layers: Layers = "last"
    """Features of the last layer; of all blocks too, normalized; or so that the last weighs as much."""
