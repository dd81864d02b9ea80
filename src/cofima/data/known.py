"""Images of classes that a model knows already, from a folder."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cofima.data.deal import choose
from cofima.data.files import ImageFile, list_images
from cofima.data.images import BadImageError, ImageSet, decode, fit
from cofima.errors import did_you_mean, problems, shortened
from cofima.progress import SILENT, Progress


@dataclass(frozen=True, eq=False)
class KnownImages:
    """Labelled images; the labels are the model's class ids."""

    images: ImageSet
    fingerprint: str


def load_known(
    root: Path,
    side: int,
    classes: Sequence[str],
    *,
    limit: int | None = None,
    seed: int = 0,
    skip_bad: bool = False,
    progress: Progress = SILENT,
) -> KnownImages:
    """Read every image below ``root`` (of ``train`` where it is split), or list all that is wrong.

    The folder may lack classes; it may have none that is not in ``classes``.
    """
    listing = list_images(root)
    number = {name: label for label, name in enumerate(classes)}
    wrong = listing.wrong + listing.duplicates()
    wrong += [
        f"class '{name}': the model does not know it{_hint(name, classes)}"
        for name in sorted(listing.classes)
        if name not in number
    ]
    files = [file for file in listing.files if file.part != "test"]
    filled = {file.class_name for file in files}
    if not skip_bad:
        wrong += [f"class '{name}': no images" for name in sorted(listing.classes) if name not in filled]
    if wrong:
        raise problems(str(root), shortened(wrong))
    pixels, faults = _read(files, side, progress)
    bad = [f"{file.path}: {fault}" for file, fault in zip(files, faults, strict=True) if fault]
    usable = [place for place, fault in enumerate(faults) if not fault]
    if (bad and not skip_bad) or not usable:
        raise problems(str(root), shortened(bad or ["there are no images"]))
    if bad:
        progress.say(f"left out {len(bad)} unreadable image{'s' if len(bad) > 1 else ''}")
    labels = torch.tensor([number[files[place].class_name] for place in usable])
    images = ImageSet(pixels, torch.tensor(usable), labels)
    if limit is not None:
        images = images.select(choose(images, lambda count: min(limit, count), seed))
    return KnownImages(images, images.fingerprint())


def _hint(name: str, classes: Sequence[str]) -> str:
    """Name the class that is meant, or all if they are few."""
    hint = did_you_mean(name, classes)
    return hint if len(classes) <= 20 or "did you mean" in hint else ""


def _read(files: Sequence[ImageFile], side: int, progress: Progress) -> tuple[Tensor, list[str]]:
    """Decode every file; return what is wrong with each, if anything."""
    pixels = torch.empty(len(files), 3, side, side, dtype=torch.uint8)

    def read(place: int) -> str:
        try:
            pixels[place] = fit(decode(files[place].path), side)
        except BadImageError as error:
            return error.reason
        return ""

    pool = ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1))
    try:
        return pixels, list(progress.track(pool.map(read, range(len(files))), len(files), "reading images"))
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, do not read the rest first
