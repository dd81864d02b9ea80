"""Checks of a source: of its list of images, and of every image by decoding it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from cofima.core.errors import first_problems
from cofima.core.names import name_fault, shortened
from cofima.core.progress import SILENT, Progress
from cofima.data.duplicates import SIDE, Looks, duplicates, thumbnail
from cofima.data.loading import loader
from cofima.data.options import DataOptions
from cofima.data.sources.base import DatasetInfo, Source


@dataclass(frozen=True, eq=False)
class Contents:
    """Hashes and faults of the images of a source.

    Attributes:
        train, test: Content hash of each image, in order.
        faults: Unreadable images, with reasons.
        shared: Names of test images that are exact copies of a training image.
        similar: Test images that are near duplicates of a training image, with its name.
    """

    train: list[str]
    test: list[str]
    faults: list[str]
    shared: list[str]
    similar: list[str]


def verify(source: Source, progress: Progress = SILENT) -> Contents:
    """Decode and hash every image."""
    samples = [*source.train, *source.test]
    small = torch.zeros(len(samples), 3, SIDE, SIDE, dtype=torch.uint8)
    found = loader.check(samples, progress, lambda at, image: small[at].copy_(thumbnail(image)))
    faults = [f"{one.name}: {fault}" for one, (_, fault) in zip(samples, found, strict=True) if fault]
    hashes = [digest for digest, _ in found]
    cut = len(source.train)
    learned, tested = (
        Looks([one.name for one in samples[part]], hashes[part], small[part])
        for part in (slice(cut), slice(cut, None))
    )
    copies = duplicates(tested, learned)
    shared = [copy.name for copy in copies if copy.exact]
    return Contents(hashes[:cut], hashes[cut:], faults, shared, [str(c) for c in copies if not c.exact])


def checked(source: Source, options: DataOptions, path: Path) -> Source:
    """Return the source with the identity of its split; raise one error that lists all problems.

    A source with the variant ``all``, which lists all images as training images, is split by the seed.
    """
    if source.variant == "all" and not source.test:
        source = source.split_by_seed(options)
    found = [f"no {part} images" for part in ("train", "test") if not getattr(source, part)]
    found += [
        f"class '{shortened(name)}': {fault}" for name in source.class_names if (fault := name_fault(name))
    ]
    if not found:
        train, test = ({picture.label for picture in part} for part in source.blocks())
        found = [*source.one_sided(train, test), *_duplicates(source)]
    if found:
        raise first_problems(f"{source.name} in {path}", found)
    return source.identified()


def count_problem(source: Source, info: DatasetInfo) -> str | None:
    """Return how a source differs from every published split, or None if it matches one."""
    counts = len(source.train), len(source.test)
    if counts in info.faults:
        return info.faults[counts][1]
    expected = list(info.variants.values())
    # for a split by seed or by a file, only the sum is known
    given = source.facts["split"] == "given"
    fits = counts in expected if given else sum(counts) in map(sum, expected)
    if fits and len(source.class_names) == info.classes:
        return None
    known = ", ".join(f"{name} {train:,} + {test:,}" for name, (train, test) in info.variants.items())
    return (
        f"{len(source.class_names):,} classes and {counts[0]:,} training + {counts[1]:,} test images; "
        f"known for {info.title}: {info.classes} classes, {known}"
    )


def _duplicates(source: Source) -> list[str]:
    counts = Counter(picture.name for part in source.blocks() for picture in part)
    return [f"{name}: listed {count} times" for name, count in counts.items() if count > 1]
