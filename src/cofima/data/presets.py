"""Transform presets: how published code, or the backbone's own library, prepares images."""

from dataclasses import dataclass, replace
from typing import Any

from cofima.data.options import Preset
from cofima.data.views import INTERPOLATIONS, Colour, View, stored_side

IMAGENET: tuple[Colour, Colour] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR: tuple[Colour, Colour] = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
UNCHANGED: tuple[Colour, Colour] = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))

# how training images differ from dataset to dataset in SLCA's code, which is also that of CoFiMA
_RESIZED_CROPS: dict[str, Any] = {"crop": 0.08}
_SLCA: dict[str, dict[str, Any]] = {
    "cifar100": _RESIZED_CROPS | {"brightness": 63 / 255, "colors": CIFAR},
    "imagenet_r": _RESIZED_CROPS,
    "cub200": {"window": True},
    "cars196": {"window": True},
    "vtab": {"window": True},
}
PAPER = tuple(_SLCA)  # the datasets of the paper


@dataclass(frozen=True)
class Wants:
    """What a backbone and a dataset say about images, for the preset to heed or not."""

    size: int
    crop_pct: float
    mean: Colour
    std: Colour
    interpolation: str
    flip: bool = False
    crop: float = 1.0


def choose(asked: Preset | None, dataset: str) -> Preset:
    """Return the preset of a run: the one asked for, or SLCA's for the datasets of the paper."""
    return asked or ("slca" if dataset in PAPER else "timm")


def view(preset: Preset, dataset: str, wants: Wants) -> View:
    """Return a preset's view of a dataset, for images in the form that :attr:`View.form` names.

    Only ``timm`` takes colors and sizes from the backbone, and the least crop from the dataset. No
    preset mirrors images of a dataset whose mirrored images mean something else.
    """
    if preset == "timm":
        interpolation = wants.interpolation if wants.interpolation in INTERPOLATIONS else "bicubic"
        side = stored_side(wants.size, wants.crop_pct)
        return View(wants.size, side, wants.mean, wants.std, wants.flip, wants.crop, interpolation)
    side, whole = wants.size * 256 // 224, round(wants.size * 300 / 224)
    plain = View(wants.size, side, *IMAGENET, flip=wants.flip, preset=preset, whole=whole)
    if preset == "pilot":
        mean, std = UNCHANGED
        return replace(plain, mean=mean, std=std, crop=0.05, interpolation="bilinear")
    own = dict(_SLCA.get(dataset, {"window": True}))
    mean, std = own.pop("colors", IMAGENET)
    return replace(plain, mean=mean, std=std, **own)


def overridden(view: View, flip: bool | None, crop: float | None) -> View:
    """Lay what the user says over a preset; a given ``crop`` stands for random crops of varying size."""
    if flip is not None:
        view = replace(view, flip=flip)
    return view if crop is None else replace(view, crop=crop, window=False)
