"""Images of classes that a model knows already, from a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cofima.data.deal import choose
from cofima.data.files import list_images
from cofima.data.forms import Form
from cofima.data.images import ImageSet
from cofima.data.kept import keep
from cofima.data.source import Picture
from cofima.errors import did_you_mean, problems, shortened
from cofima.progress import SILENT, Progress


@dataclass(frozen=True, eq=False)
class KnownImages:
    """Labelled images; the labels are the model's class ids."""

    images: ImageSet
    fingerprint: str


def load_known(
    root: Path,
    form: Form,
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
    pictures = [Picture(file.key, number[file.class_name], file.path.read_bytes) for file in files]
    kept = keep(pictures, form, despite_faults=skip_bad, progress=progress)
    bad = [f"{file.path}: {fault}" for file, fault in zip(files, kept.faults, strict=True) if fault]
    usable = [place for place, fault in enumerate(kept.faults) if not fault]
    if (bad and not skip_bad) or not usable:
        raise problems(str(root), shortened(bad or ["there are no images"]))
    if bad:
        progress.say(f"left out {len(bad)} unreadable image{'s' if len(bad) > 1 else ''}")
    labels = torch.tensor([number[files[place].class_name] for place in usable])
    images = ImageSet(kept.pixels, torch.tensor(usable), labels)
    if limit is not None:
        images = images.select(choose(images, lambda count: min(limit, count), seed))
    return KnownImages(images, kept.fingerprint(images))


def _hint(name: str, classes: Sequence[str]) -> str:
    """Name the class that is meant, or all if they are few."""
    hint = did_you_mean(name, classes)
    return hint if len(classes) <= 20 or "did you mean" in hint else ""
