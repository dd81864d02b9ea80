"""A user's own folder of images: checked as a whole, decoded once, split if it is not yet."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cofima.data.deal import part, shuffled
from cofima.data.files import ImageFile, Listing, list_images, plain
from cofima.data.forms import Form
from cofima.data.images import ImageSet
from cofima.data.kept import keep
from cofima.data.options import DataOptions
from cofima.data.own_folder import key_of, split_id
from cofima.data.source import Picture
from cofima.data.splits import split_facts
from cofima.data.stream import Dataset
from cofima.errors import CofimaWarning, first_problems
from cofima.progress import SILENT, Progress

_SHOWN = 20


def load_folder(root: Path, form: Form, options: DataOptions, progress: Progress = SILENT) -> Dataset:
    """Read every image below ``root`` in a form, or list all that is wrong with the folder.

    The folder holds ``train/`` and ``test/`` (or ``val/``) with one folder per class each, or one
    folder per class, of which a share of each class is set aside as test images.
    """
    listing = list_images(root)
    pictures = [Picture(f"{file.part}/{file.key}", 0, file.path.read_bytes) for file in listing.files]
    read = keep(pictures, form, despite_faults=options.skip_bad, progress=progress)
    usable = [place for place, fault in enumerate(read.faults) if not (fault and options.skip_bad)]
    left_out = _unusable_classes(listing, [listing.files[place] for place in usable])
    _refuse(root, listing, read.faults, left_out, options.skip_bad)

    names = sorted(set(listing.classes) - set(left_out))
    usable = [place for place in usable if listing.files[place].class_name not in left_out]
    files = [listing.files[place] for place in usable]
    number = {name: label for label, name in enumerate(names)}
    labels = torch.tensor([number[file.class_name] for file in files])
    images = ImageSet(read.pixels, torch.tensor(usable), labels)
    tested = _tested(files, options)
    train, test = images.select(~tested), images.select(tested)
    facts = {"train": len(train), "test": len(test), **_facts(root, listing, options)}
    facts["skipped"] = _skipped(listing, read.faults, left_out)
    facts["train_test_overlap"] = _overlap(read.hashes, train, test)
    named = ([(key_of(listing.files[row]), label) for row, label in half.named()] for half in (train, test))
    facts |= split_facts(split_id(root, "all" in listing.parts, options), *named)
    facts["fingerprint"] = read.fingerprint(images)
    _warn(root, facts)
    return Dataset(f"folder:{root}", tuple(names), train, test, flip=True, crop=0.5, facts=facts)


def _unusable_classes(listing: Listing, usable: list[ImageFile]) -> dict[str, str]:
    """Return, for each class that cannot be both learnt and tested, why."""
    counts = Counter((file.class_name, file.part) for file in usable)
    reasons = {name: _too_few(name, listing, counts) for name in sorted(listing.classes)}
    return {name: reason for name, reason in reasons.items() if reason}


def _too_few(name: str, listing: Listing, counts: Counter[tuple[str, str]]) -> str:
    having = [folder.name for which, folder in listing.parts.items() if counts[name, which]]
    lacking = [folder.name for which, folder in listing.parts.items() if not counts[name, which]]
    if not having:
        return f"class '{name}': no images"
    if lacking:
        return f"class '{name}': images in {having[0]} only, none in {lacking[0]}"
    return f"class '{name}': 1 image, too few to train and test" if counts[name, "all"] == 1 else ""


def _refuse(root: Path, listing: Listing, faults: list[str], left_out: dict[str, str], skip: bool) -> None:
    """Raise one error with everything that is wrong and that may not be skipped."""
    found = listing.wrong + listing.duplicates()
    if not skip:
        found += left_out.values()
        found += [f"{file.path}: {fault}" for file, fault in zip(listing.files, faults, strict=True) if fault]
    elif len(left_out) == len(listing.classes):
        found += left_out.values()
    if found:
        raise first_problems(str(root), found)


def _tested(files: list[ImageFile], options: DataOptions) -> Tensor:
    """Return which files are tested on: the test part, or a share of each class of an unsplit folder."""
    tested = torch.tensor([file.part == "test" for file in files])
    by_class: dict[str, list[int]] = {}
    for place, file in enumerate(files):
        if file.part == "all":
            by_class.setdefault(file.class_name, []).append(place)
    for places in by_class.values():
        order = shuffled([files[place].key for place in places], options.split_seed)
        for chosen in order[: part(options.test_share, len(places))]:
            tested[places[chosen]] = True
    return tested


def _overlap(hashes: list[str], train: ImageSet, test: ImageSet) -> int:
    """Count the test images that are copies of a training image."""
    learnt = {hashes[row] for row in train.rows.tolist()}
    return sum(hashes[row] in learnt for row in test.rows.tolist())


def _skipped(listing: Listing, faults: list[str], left_out: dict[str, str]) -> dict[str, Any]:
    files = [plain(str(f.path)) for f, fault in zip(listing.files, faults, strict=True) if fault]
    return {"images": len(files), "classes": len(left_out), "first": [*left_out.values(), *files][:_SHOWN]}


def _facts(root: Path, listing: Listing, options: DataOptions) -> dict[str, Any]:
    facts: dict[str, Any] = {"folder": plain(str(root.resolve())), "stray_images": len(listing.stray)}
    if "all" in listing.parts:
        return facts | {
            "split": f"per class, {options.test_share:g} tested",
            "split_seed": options.split_seed,
        }
    given = " + ".join(folder.name for folder in listing.parts.values())
    return facts | {"split": f"given: {given}", "split_seed": None, "unused_folders": listing.unused}


def _warn(root: Path, facts: dict[str, Any]) -> None:
    skipped, overlap, stray = facts["skipped"], facts["train_test_overlap"], facts["stray_images"]
    for count, text in (
        (
            skipped["images"] or skipped["classes"],
            f"left out {_count(skipped['images'], 'unreadable image')} and "
            f"{_count(skipped['classes'], 'class', 'es')} without both training and test images",
        ),
        (overlap, f"{_count(overlap, 'test image')} also in the training part: accuracy will look too high"),
        (stray, f"{_count(stray, 'image')} outside the class folders not used"),
    ):
        if count:
            warnings.warn(f"{root}: {text}", CofimaWarning, stacklevel=4)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
