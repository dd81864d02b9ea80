"""Checks of a source: of the list of its images, and of every image by reading it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cofima.core.errors import first_problems
from cofima.core.progress import SILENT, Progress
from cofima.data.loading import loader
from cofima.data.sources.base import About, Source


@dataclass(frozen=True, eq=False)
class Contents:
    """What the images of a source hold.

    Attributes:
        train, test: The hash of each image's content, in order.
        faults: The images that cannot be read, and why.
        shared: The names of test images that are copies of a training image.
    """

    train: list[str]
    test: list[str]
    faults: list[str]
    shared: list[str]


def verify(source: Source, progress: Progress = SILENT) -> Contents:
    """Decode and hash every image."""
    samples = [*source.train, *source.test]
    found = loader.check(samples, progress)
    faults = [f"{one.name}: {fault}" for one, (_, fault) in zip(samples, found, strict=True) if fault]
    hashes = [digest for digest, _ in found]
    train, test = hashes[: len(source.train)], hashes[len(source.train) :]
    learned = {digest for digest in train if digest}
    shared = [one.name for one, digest in zip(source.test, test, strict=True) if digest in learned]
    return Contents(train, test, faults, shared)


def refuse(source: Source, path: Path) -> None:
    """Raise one error with everything that makes a source unusable."""
    found = [f"no {part} images" for part in ("train", "test") if not getattr(source, part)]
    if not found:
        found = [*_one_sided(source), *_twice(source)]
    if found:
        raise first_problems(f"{source.name} in {path}", found)


def count_problem(source: Source, about: About) -> str | None:
    """Say how a source differs from every split that is known, and what is known."""
    counts = len(source.train), len(source.test)
    if counts in about.faults:
        return about.faults[counts][1]
    expected = list(about.variants.values())
    dealt = source.facts["split"] != "given"  # here, or by a file: then only the sum is known
    if (sum(counts) in map(sum, expected) if dealt else counts in expected) and len(
        source.class_names
    ) == about.classes:
        return None
    known = ", ".join(f"{name} {train:,} + {test:,}" for name, (train, test) in about.variants.items())
    return (
        f"{len(source.class_names):,} classes and {counts[0]:,} training + {counts[1]:,} test images; "
        f"known for {about.title}: {about.classes} classes, {known}"
    )


def _one_sided(source: Source) -> list[str]:
    train, test = (Counter(p.label for p in part) for part in (source.train, source.test))
    found = []
    for label, name in enumerate(source.class_names):
        if train[label] and test[label]:
            continue
        lacking = (
            "training or test" if train[label] == test[label] else "test" if train[label] else "training"
        )
        found.append(f"class '{name}': no {lacking} images")
    return found


def _twice(source: Source) -> list[str]:
    counts = Counter(picture.name for part in (source.train, source.test) for picture in part)
    return [f"{name}: listed {count} times" for name, count in counts.items() if count > 1]
