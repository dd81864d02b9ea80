"""A source becomes a dataset: its images are read, checked and kept."""

import warnings
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch

from cofima.data.forms import Form
from cofima.data.images import ImageSet
from cofima.data.kept import Kept, keep, keep_small
from cofima.data.source import Picture, Source
from cofima.data.stream import Dataset
from cofima.errors import CofimaError, CofimaWarning, first_problems, problems
from cofima.progress import SILENT, Progress

_SHOWN = 20


def materialise(
    source: Source, form: Form, *, skip_bad: bool = False, progress: Progress = SILENT
) -> Dataset:
    """Read the images of a source in a form, or say what is wrong with all that cannot be read.

    ``skip_bad`` leaves unreadable images out, and counts them.
    """
    parts = (source.train, source.test)
    kept = keep_small(parts) or [
        keep(part, one, despite_faults=skip_bad, progress=progress)
        for part, one in zip(parts, (form, replace(form, only_tested=bool(form.whole))), strict=True)
    ]
    _refuse(source, kept, skip_bad)
    train, test = (_images(part, one) for part, one in zip(parts, kept, strict=True))
    _refuse_empty(source, train, test)
    facts = dict(source.facts) | {"train": len(train), "test": len(test), **_overlap(kept, train, test)}
    if skip_bad:
        facts["skipped"] = _skipped(source, kept)
    ends = "".join(one.fingerprint(images) for one, images in zip(kept, (train, test), strict=True))
    facts["fingerprint"] = sha256(ends.encode()).hexdigest()
    return Dataset(source.name, source.class_names, train, test, source.flip, source.crop, facts)


def _images(pictures: Any, kept: Kept) -> ImageSet:
    good = torch.tensor([row for row, fault in enumerate(kept.faults) if not fault], dtype=torch.int64)
    labels = torch.tensor([picture.label for picture in pictures], dtype=torch.int64)
    return ImageSet(kept.pixels, good, labels[good])


def _bad(source: Source, kept: list[Kept]) -> list[tuple[Picture, str]]:
    pairs = zip([*source.train, *source.test], [f for one in kept for f in one.faults], strict=True)
    return [(picture, fault) for picture, fault in pairs if fault]


def _refuse(source: Source, kept: list[Kept], skip_bad: bool) -> None:
    found = [f"{picture.name}: {fault}" for picture, fault in _bad(source, kept)]
    if found and not skip_bad:
        advice = "mend or remove them, or leave them out with data.skip_bad=true (--skip-bad)"
        raise CofimaError(f"{first_problems(f'dataset {source.name}', found)}\n  {advice}")


def _refuse_empty(source: Source, train: ImageSet, test: ImageSet) -> None:
    """Refuse classes that cannot be both learnt and tested, once unreadable images are left out."""
    found = [
        f"class '{name}': no readable image to {what}"
        for what, counts in (("learn", train.counts()), ("test", test.counts()))
        for label, name in enumerate(source.class_names)
        if label not in counts
    ]
    if found:
        raise problems(f"dataset {source.name}", found)


def _overlap(kept: list[Kept], train: ImageSet, test: ImageSet) -> dict[str, int]:
    """Count the test images that are copies of a training image, and warn of them."""
    learnt = {kept[0].hashes[row] for row in train.rows.tolist()}
    count = sum(kept[1].hashes[row] in learnt for row in test.rows.tolist())
    if count:
        text = f"{count} test image(s) also in the training part: accuracy will look too high"
        warnings.warn(text, CofimaWarning, stacklevel=3)
    return {"train_test_overlap": count}


def _skipped(source: Source, kept: list[Kept]) -> dict[str, Any]:
    names = [picture.name for picture, _ in _bad(source, kept)]
    if names:
        text = f"{source.name}: left out {len(names)} unreadable image(s)"
        warnings.warn(text, CofimaWarning, stacklevel=3)
    return {"images": len(names), "classes": 0, "first": names[:_SHOWN]}
