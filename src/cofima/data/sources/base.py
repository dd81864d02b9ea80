"""What a dataset's file says of it, and what its copies on a disk have in common."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cofima.data.options import DataOptions
from cofima.data.source import Picture, Source
from cofima.errors import CofimaError

SYSTEM = Path("/usr/share/datasets")  # where Debian's packages of datasets put them


@dataclass(frozen=True)
class About:
    """What is expected of a dataset, whether or not it is on this machine.

    Attributes:
        variants: Training and test images of each split that is known, by its name.
        layouts: What a copy looks like, by the name that ``data.layout`` takes.
        faults: What is wrong with copies of these counts, which are known to occur: variant, and why.
    """

    title: str
    classes: int
    variants: Mapping[str, tuple[int, int]]
    layouts: Mapping[str, str]
    url: str
    flip: bool
    crop: float
    faults: Mapping[tuple[int, int], tuple[str, str]] = field(default_factory=dict)

    def variant(self, train: int, test: int) -> str:
        """Name the split that has these counts; ``other`` where none is known."""
        if (train, test) in self.faults:
            return self.faults[train, test][0]
        return next((name for name, counts in self.variants.items() if counts == (train, test)), "other")

    def make(self, name: str, pictures: "Parts", class_names: Sequence[str], variant: str = "") -> Source:
        """Return a source with its images in order of class and name, however they were found."""
        train, test = (sorted(part, key=lambda p: (p.label, p.name)) for part in pictures)
        variant = variant or self.variant(len(train), len(test))
        facts = {"split": "given", "split_seed": None}
        return Source(name, variant, tuple(class_names), train, test, self.flip, self.crop, facts)


Parts = tuple[Iterable[Picture], Iterable[Picture]]  # training and test


@dataclass(frozen=True)
class Copy:
    """One copy of a dataset, in one of the layouts that are known, not opened yet."""

    layout: str
    path: Path
    open: Callable[[DataOptions], Source]


def roots(root: Path | None) -> list[Path]:
    """Return the folders in which datasets are looked for, in order; each may have a folder ``data``."""
    shared = os.environ.get("COFIMA_DATA")
    given = [root] if root is not None else [*([Path(shared)] if shared else []), Path()]
    found = [place for at in given for place in (at.expanduser(), at.expanduser() / "data")]
    return found if root is not None else [*found, SYSTEM]


def named(root: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield the folder ``root`` itself, the folders in it, and those in these, that have one of the names.

    Case, hyphens and underscores do not matter: ``CUB_200_2011`` is ``cub-200-2011``.
    """
    wanted = {_key(name) for name in names}
    if root.is_dir() and _key(root.resolve().name) in wanted:
        yield from [root, *_below(root, wanted)]
    for folder in _below(root, wanted):
        yield from [folder, *_below(folder, wanted)]


def files(root: Path, folders: Iterable[str], names: Iterable[str]) -> Iterator[Path]:
    """Yield the files of these names in ``root`` and in its folders of the given names."""
    wanted = set(names)
    for place in [root, *(folder for folder in named(root, folders) if folder != root)]:
        yield from (path for path in _entries(place) if path.name.casefold() in wanted and path.is_file())


def _below(folder: Path, wanted: set[str]) -> list[Path]:
    return [path for path in _entries(folder) if _key(path.name) in wanted and path.is_dir()]


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise CofimaError(f"{folder}: {(error.strerror or str(error)).lower()}") from error


def _key(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter not in "-_ ")
