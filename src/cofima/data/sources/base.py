"""Sources: datasets whose images are listed but not read, and copies of a dataset on disk."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cofima.core.errors import CofimaError, file_error, first_problems, problems
from cofima.core.paths import expand
from cofima.data.download import RemoteFile
from cofima.data.loading.loader import Content, Sample
from cofima.data.options import DataOptions
from cofima.data.splits import (
    choose_per_class,
    choose_share,
    seeded_facts,
    seeded_name,
    share_of,
    split_facts,
)

SYSTEM = Path("/usr/share/datasets")  # location of Debian's dataset packages
SHOWN = 20  # number of skipped images that are named

LabeledRow = tuple[int, int]  # row of an image in its block of pixels, and its label
TrainAndTest = tuple[Iterable[Sample], Iterable[Sample]]


class Usable(NamedTuple):
    """Usable images of a dataset, after all have been read."""

    class_names: tuple[str, ...]
    train: list[LabeledRow]
    test: list[LabeledRow]
    facts: dict[str, Any]
    warnings: list[str]


@dataclass(frozen=True, eq=False)
class Source:
    """Dataset whose images are listed but not read.

    Attributes:
        name: Name of the dataset.
        variant: Name of the split, e.g. "official", "pilot", "seed0".
        class_names: Names of the classes, by label.
        train: Training images.
        test: Test images.
        flip: True if mirroring an image does not change its class.
        crop: Minimum share of the area that a random training crop keeps; 1.0 disables random crops.
        facts: Metadata for a result file; JSON-serializable.
        exact_share: In a seeded split, make the test share exact over all images, instead of rounding it for
            each class.
    """

    name: str
    variant: str
    class_names: tuple[str, ...]
    train: Sequence[Sample]
    test: Sequence[Sample]
    flip: bool
    crop: float
    facts: dict[str, Any]
    exact_share: bool = False

    def blocks(self) -> Sequence[Sequence[Sample]]:
        """Return the training images and the test images."""
        return self.train, self.test

    def usable(self, faults: Sequence[Sequence[str]], skip_unreadable: bool) -> Usable:
        """Raise for unreadable images, or skip them as long as every class keeps some."""
        pairs = zip([*self.train, *self.test], [fault for block in faults for fault in block], strict=True)
        bad = [(picture.name, fault) for picture, fault in pairs if fault]
        if bad and not skip_unreadable:
            advice = "mend or remove them, or leave them out: data.skip_unreadable=true (--skip-unreadable)"
            error = first_problems(f"dataset {self.name}", [f"{name}: {fault}" for name, fault in bad])
            raise CofimaError(f"{error}\n  {advice}")
        train, test = (
            [(row, picture.label) for row, picture in enumerate(block) if not wrong[row]]
            for block, wrong in zip(self.blocks(), faults, strict=True)
        )
        if found := self.one_sided({label for _, label in train}, {label for _, label in test}, "readable "):
            raise problems(f"dataset {self.name}", found)
        facts = self.facts | {"train": len(train), "test": len(test)}
        if skip_unreadable:
            facts["skipped"] = {"images": len(bad), "classes": 0, "first": [name for name, _ in bad[:SHOWN]]}
        warnings = [f"left out {counted(len(bad), 'unreadable image')}"] if bad else []
        return Usable(self.class_names, train, test, facts, warnings)

    def one_sided(self, train: set[int], test: set[int], kind: str = "") -> list[str]:
        """Return a problem for each class that lacks training or test images."""
        found = []
        for label, name in enumerate(self.class_names):
            parts = [part for part, labels in (("training", train), ("test", test)) if label not in labels]
            if parts:
                found.append(f"class '{name}': no {kind}{' or '.join(parts)} images")
        return found

    def split_by_seed(self, options: DataOptions) -> "Source":
        """Return the source with a seeded test split of each class; it depends only on seed and names."""
        samples = [*self.train, *self.test]
        names, labels = [picture.name for picture in samples], [picture.label for picture in samples]
        share, seed = options.test_fraction, options.split_seed
        if self.exact_share:
            tested = choose_share(names, labels, share, seed)
        else:
            tested = choose_per_class(names, labels, lambda count: share_of(count, share), seed)
        # grouped by class in order of first occurrence: the order is part of the split's hash
        first = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        pairs = sorted(zip(samples, tested, strict=True), key=lambda pair: first[pair[0].label])
        train, test = ([picture for picture, chosen in pairs if chosen is part] for part in (False, True))
        facts = self.facts | seeded_facts(options)
        return replace(self, variant=seeded_name(options), train=train, test=test, facts=facts)

    def identified(self) -> "Source":
        """Return the source with name, hash and counts of its split added to its facts."""
        facts = self.facts | {"train": len(self.train), "test": len(self.test)}
        train, test = ([(picture.name, picture.label) for picture in part] for part in self.blocks())
        return replace(self, facts=facts | split_facts(f"{self.name}:{self.variant}", train, test))


def numbered_samples(
    part: str, labels: Iterable[int], read: Callable[[int], Content], digits: int = 5
) -> list[Sample]:
    """Return samples without names of their own, named by their number within a part."""
    return [Sample(f"{part}/{n:0{digits}}", label, partial(read, n)) for n, label in enumerate(labels)]


@dataclass(frozen=True)
class Download:
    """Published files of a dataset, and how they are installed.

    Attributes:
        target: Resulting folder below the data root, or single file if it is used without unpacking.
        files: The files; archives are unpacked into the folder.
        terms: Terms that the user must accept, with their source; most datasets have none.
        by_hand: Why files without an address cannot be downloaded by a program, and where to get them.
    """

    target: str
    files: tuple[RemoteFile, ...]
    terms: str = ""
    by_hand: str = ""


@dataclass(frozen=True)
class DatasetInfo:
    """Published facts about a dataset, whether or not it is on this machine.

    Attributes:
        name: Name on the command line and in ``dataset`` of a configuration.
        title: Name for display.
        classes: Number of classes.
        variants: Numbers of training and test images of each known split, by its name.
        layouts: Description of each layout on disk, by its name in ``data.layout``.
        url: Address where the dataset can be found.
        crop: Minimum share of the area that a random training crop keeps.
        faults: Counts of copies that are known to be wrong, with a variant and an explanation.
        class_key: Sort key of class folders; by default their names.
        fixed_order: Classes arrive in the order of their numbers, and are not shuffled by a seed.
        download: Published files, if known.
    """

    name: str
    title: str
    classes: int
    variants: Mapping[str, tuple[int, int]]
    layouts: Mapping[str, str]
    url: str
    crop: float = 0.5
    faults: Mapping[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    class_key: Callable[[str], tuple[int, str]] | None = None
    fixed_order: bool = False
    download: Download | None = None

    def variant(self, train: int, test: int) -> str:
        """Return the name of the split with these counts; ``other`` if it is not known."""
        if (train, test) in self.faults:
            return self.faults[train, test][0]
        return next((name for name, counts in self.variants.items() if counts == (train, test)), "other")

    def source(self, samples: TrainAndTest, class_names: Sequence[str], variant: str = "") -> Source:
        """Return a source with its images sorted by class and name."""
        train, test = (sorted(part, key=lambda p: (p.label, p.name)) for part in samples)
        variant = variant or self.variant(len(train), len(test))
        facts: dict[str, Any] = {"split": "given", "split_seed": None}
        if self.fixed_order:
            facts["class_order"] = "given"
        return Source(self.name, variant, tuple(class_names), train, test, True, self.crop, facts)


@dataclass(frozen=True)
class Copy:
    """Copy of a dataset in one of its known layouts, not opened yet."""

    layout: str
    path: Path
    open: Callable[[], Source]


def search_roots(root: Path | None) -> list[Path]:
    """Return the folders searched for datasets, in order, each followed by its subfolder ``data``."""
    shared = os.environ.get("COFIMA_DATA")
    given = [root] if root is not None else [*([Path(shared)] if shared else []), Path()]
    found = [place for at in given for place in (expand(at), expand(at) / "data")]
    return found if root is not None else [*found, SYSTEM]


def folders_named(root: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield the folders with one of the names: ``root`` itself, its subfolders, and matches within a match.

    Case, hyphens and underscores are ignored: ``CUB_200_2011`` matches ``cub-200-2011``.
    """
    wanted = {_key(name) for name in names}
    if root.is_dir() and _key(root.resolve().name) in wanted:
        yield from [root, *_below(root, wanted)]
    for folder in _below(root, wanted):
        yield from [folder, *_below(folder, wanted)]


def files_named(root: Path, folders: Iterable[str], names: Iterable[str]) -> Iterator[Path]:
    """Yield the files with one of the names, in ``root`` and in its folders with the given names."""
    wanted = set(names)
    for place in [root, *(folder for folder in folders_named(root, folders) if folder != root)]:
        yield from (path for path in _entries(place) if path.name.casefold() in wanted and path.is_file())


def _below(folder: Path, wanted: set[str]) -> list[Path]:
    return [path for path in _entries(folder) if _key(path.name) in wanted and path.is_dir()]


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise file_error(folder, error) from error


def _key(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter not in "-_ ")


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun: ``1 image``, ``2 images``."""
    return f"{number} {noun}{'' if number == 1 else plural}"
