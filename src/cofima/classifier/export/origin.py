"""Where a model comes from and how good it is, as far as that is known."""

from dataclasses import dataclass
from pathlib import PurePath

import timm

from cofima.store.model import Model


@dataclass(frozen=True)
class Origin:
    """Where a backbone's weights come from: its name on the hub and its licence, as far as they are known."""

    hub: str | None
    licence: str | None


def origin_of(model: Model) -> Origin:
    """Look the backbone up in timm; weights from a file or from scratch have no origin that is known."""
    options = model.config.model
    if not options.pretrained or options.checkpoint is not None:
        return Origin(None, None)
    if model.config.backbone.startswith("vit_micro"):
        return Origin(None, "apache-2.0")
    known = timm.get_pretrained_cfg(model.backbone.name, allow_unregistered=True)
    hub = getattr(known, "hf_hub_id", None)
    return Origin(hub if hub and not hub.endswith("/") else None, getattr(known, "license", None))


def measured(model: Model) -> tuple[float, int, str] | None:
    """Return the last accuracy in percent, the images it rests on, and what they are; or None."""
    kept = model.serving.get("accuracy")
    if kept is not None and kept["images"]:
        images = sum(kept["images"].values())
        what = "held out when it last learned; they also decided when to stop"
        if len(kept["images"]) < len(model.classes):
            what += f", of {len(kept['images'])} of the {len(model.classes)} classes"
        return 100 * sum(kept["right"].values()) / images, images, what
    last = model.history[-1] if model.history else None
    if last is not None and last.kind == "task" and last.overall is not None:
        return last.overall, sum(last.sizes), "test images of all classes"
    return None


def data_name(model: Model) -> str:
    """Return the name of the images' folder; where it lies is nobody's business."""
    said = str(model.data.get("name") or model.config.dataset)
    return PurePath(said.removeprefix("folder:")).name or said
