"""Class folders as a dataset: a user's own ``folder:PATH``, and copies of known datasets in this layout."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cofima.core.errors import CofimaError, did_you_mean, first_problems
from cofima.core.names import shortened
from cofima.core.paths import exists, expand
from cofima.core.progress import SILENT, Progress
from cofima.data.loading.loader import Sample
from cofima.data.options import DataOptions
from cofima.data.sources.base import SHOWN, Copy, DatasetInfo, Source, Usable, counted
from cofima.data.sources.checks import checked
from cofima.data.sources.listing import TESTS, TRAIN, ImageFile, Listing, list_images, normalize_name
from cofima.data.splits import choose_per_class, seeded_facts, seeded_name, share_of, split_facts

PREFIX, USAGE = "folder:", "folder:PATH"
DESCRIPTION = "your own images: PATH/train and PATH/test (or val), or one folder per class"
TRAIN_AND_TEST = "train/CLASS/*.jpg and test/CLASS/*.jpg (or val)"


@dataclass(frozen=True, eq=False)
class Folder:
    """User's own folder of images; without a test part, a share of each class is used for testing.

    Unlike other sources, an unsplit folder is split after its images are read, without the skipped ones.
    """

    listing: Listing
    options: DataOptions
    flip: bool = True
    crop: float = 0.5

    @property
    def name(self) -> str:
        """Path as text."""
        return str(self.listing.path)

    def blocks(self) -> Sequence[Sequence[Sample]]:
        """Return all images in one block."""
        return ([Sample(f"{file.part}/{file.key}", 0, file.path.read_bytes) for file in self.listing.files],)

    def usable(self, faults: Sequence[Sequence[str]], skip_unreadable: bool) -> Usable:
        """Raise one error that lists all problems, or skip those that may be skipped; then split."""
        files = self.listing.files
        bad = [(file, fault) for file, fault in zip(files, faults[0], strict=True) if fault]
        rows = [row for row, fault in enumerate(faults[0]) if not (fault and skip_unreadable)]
        left_out = _left_out(self.listing, [files[row] for row in rows])
        found = list(self.listing.wrong)
        if not skip_unreadable or len(left_out) == len(self.listing.folders):
            found += left_out.values()
        if not skip_unreadable:
            found += [f"{file.path}: {fault}" for file, fault in bad]
        if found:
            raise first_problems(self.name, found)
        names = sorted(self.listing.folders.keys() - left_out.keys())
        rows = [row for row in rows if files[row].class_name not in left_out]
        train, test = self._split(rows, {name: label for label, name in enumerate(names)})
        first = [*left_out.values(), *(normalize_name(str(file.path)) for file, _ in bad)][:SHOWN]
        skipped = {"images": len(bad), "classes": len(left_out), "first": first}
        facts = {"train": len(train), "test": len(test), **self._facts(), "skipped": skipped}
        named = ([(files[row].name, label) for row, label in part] for part in (train, test))
        facts |= split_facts(self._split_id(), *named)
        return Usable(tuple(names), train, test, facts, self._warnings(len(bad), len(left_out)))

    def source(self) -> Source:
        """Return the folder as a source, assuming that every image is readable."""
        files = self.listing.files
        usable = self.usable([[""] * len(files)], self.options.skip_unreadable)
        train, test = (
            [Sample(files[row].name, label, files[row].path.read_bytes) for row, label in part]
            for part in (usable.train, usable.test)
        )
        name, _, variant = self._split_id().rpartition(":")
        source = Source(name, variant, usable.class_names, train, test, self.flip, self.crop, usable.facts)
        return checked(source, self.options, self.listing.path)

    def _split(self, rows: list[int], number: dict[str, int]) -> tuple[list[tuple[int, int]], ...]:
        files = [self.listing.files[row] for row in rows]
        tested = [file.part == "test" for file in files]
        if self.listing.unsplit:
            tested = choose_per_class(
                [file.key for file in files],
                [file.class_name for file in files],
                lambda count: share_of(count, self.options.test_fraction),
                self.options.split_seed,
            )
        places = [(row, number[file.class_name]) for row, file in zip(rows, files, strict=True)]
        return tuple(
            [place for place, chosen in zip(places, tested, strict=True) if chosen is part]
            for part in (False, True)
        )

    def _split_id(self) -> str:
        """Return the name of the split; its hash, not this name, distinguishes folders of the same name."""
        variant = seeded_name(self.options) if self.listing.unsplit else "given"
        return f"{PREFIX}{normalize_name(self.listing.path.resolve().name)}:{variant}"

    def _facts(self) -> dict[str, Any]:
        listing = self.listing
        facts = {"folder": normalize_name(str(listing.path.resolve())), "stray_images": len(listing.stray)}
        if listing.unsplit:
            return facts | seeded_facts(self.options)
        given = " + ".join(folder.name for folder in listing.parts.values())
        return facts | {"split": f"given: {given}", "split_seed": None, "unused_folders": listing.unused}

    def _warnings(self, images: int, classes: int) -> list[str]:
        stray, found = len(self.listing.stray), []
        if images or classes:
            found.append(
                f"left out {counted(images, 'unreadable image')} and {counted(classes, 'class', 'es')} "
                "without both training and test images"
            )
        return [*found, *([f"{counted(stray, 'image')} outside the class folders not used"] if stray else [])]


def path_of(name: str, root: Path | None) -> Path:
    """Return the folder of a dataset: below ``root``, by default $COFIMA_DATA or the working directory."""
    path = expand(name.removeprefix(PREFIX))
    shared = expand(os.environ.get("COFIMA_DATA") or ".")
    return root / path if root is not None else shared / path if exists(shared / path) else path


def check(name: str, root: Path | None) -> str | None:
    """Return the problem with the name, or None if it is valid."""
    if not name.removeprefix(PREFIX).strip():
        return f"dataset '{name}' needs a path: 'folder:PATH'"
    try:
        path = path_of(name, root)
        there = exists(path)
    except CofimaError as error:
        return f"dataset '{shortened(name)}': {error}"
    if not there:
        near = [folder.name for folder in path.parent.iterdir()] if path.parent.is_dir() else []
        close = did_you_mean(path.name, near)
        return f"dataset '{name}': there is no folder {path}{close if 'did you mean' in close else ''}"
    return None if path.is_dir() else f"dataset '{name}': {path} is not a folder"


def find(name: str, options: DataOptions, progress: Progress = SILENT) -> Folder:
    """List the images of a folder, given the name of the dataset."""
    return Folder(list_images(path_of(name, options.root)), options)


def _left_out(listing: Listing, usable: list[ImageFile]) -> dict[str, str]:
    """Return, by class, why it cannot be both trained and tested."""
    counts = Counter((file.class_name, file.part) for file in usable)
    reasons = {name: _too_few(name, listing, counts) for name in sorted(listing.folders)}
    return {name: reason for name, reason in reasons.items() if reason}


def _too_few(name: str, listing: Listing, counts: Counter[tuple[str, str]]) -> str:
    having = [folder.name for which, folder in listing.parts.items() if counts[name, which]]
    lacking = [folder.name for which, folder in listing.parts.items() if not counts[name, which]]
    if not having:
        return f"class '{name}': no images"
    if lacking:
        return f"class '{name}': images in {having[0]} only, none in {lacking[0]}"
    return f"class '{name}': 1 image, too few to train and test" if counts[name, "all"] == 1 else ""


def has_train_and_test(folder: Path) -> bool:
    """Return True if a folder has both a training and a test part."""
    return (folder / TRAIN).is_dir() and any((folder / test).is_dir() for test in TESTS)


def train_test_copies(info: DatasetInfo, folders: Iterable[Path]) -> Iterator[Copy]:
    """Yield the copies of a dataset with folders ``train`` and ``test`` (or ``val``)."""
    for folder in folders:
        if has_train_and_test(folder):
            yield Copy("folders", folder, partial(_open_train_test, info, folder))


def _open_train_test(info: DatasetInfo, folder: Path) -> Source:
    """List a copy of a dataset with ``train`` and ``test`` (or ``val``).

    Classes are numbered in the order of their folders' names, as in torchvision, which published class
    orders are based on, or in the order of ``info.class_key``.
    """
    listing = list_images(folder, f"{info.name} in {folder}")
    names = sorted(listing.folders, key=info.class_key)
    number = {name: label for label, name in enumerate(names)}
    parts = [[file for file in listing.files if file.part == part] for part in ("train", "test")]
    # a sample's name includes the part only if both parts have images of the same path
    both = {file.key for file in parts[0]} & {file.key for file in parts[1]}
    train, test = (
        [Sample(f.name if both else f.key, number[f.class_name], f.path.read_bytes) for f in part]
        for part in parts
    )
    return info.source((train, test), names)
