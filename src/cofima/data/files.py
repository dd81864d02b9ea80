"""What a folder of images holds: its parts, its classes and their files."""

import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cofima.errors import CofimaError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
_TRAIN, _TESTS = "train", ("test", "val")


@dataclass(frozen=True)
class ImageFile:
    """An image file, its class, and its part: ``train``, ``test``, or ``all`` of an unsplit folder."""

    path: Path
    part: str
    class_name: str
    key: str  # its path below the part, the same on every machine


@dataclass
class Listing:
    """Everything that was found in a folder."""

    parts: dict[str, Path]
    classes: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))
    files: list[ImageFile] = field(default_factory=list)
    stray: list[Path] = field(default_factory=list)  # images outside the class folders
    unused: list[str] = field(default_factory=list)  # folders beside train and test
    wrong: list[str] = field(default_factory=list)  # what cannot be skipped

    def duplicates(self) -> list[str]:
        """Return a problem for each class name that is spelt in more than one way."""
        spellings: dict[str, list[Path]] = defaultdict(list)
        for name, folders in self.classes.items():
            spellings[name.casefold()] += folders
        return [
            f"duplicate class names, the same but for case, spaces or Unicode form: {_quoted(folders)}"
            for _, folders in sorted(spellings.items())
            if len({folder.name for folder in folders}) > 1
        ]


def list_images(root: Path) -> Listing:
    """List the images below ``root``: ``train/`` and ``test/`` (or ``val/``), or one folder per class."""
    try:
        listing = _list(root)
    except OSError as error:
        raise CofimaError(_said(error)) from error
    if not listing.classes and not listing.wrong:
        raise CofimaError(f"{root} has no classes: put the images of each class into a folder of its own")
    return listing


def plain(name: str) -> str:
    """Return a name as it is shown and compared: composed Unicode, no outer spaces, no undecodable bytes."""
    return unicodedata.normalize("NFC", name.encode("utf-8", "replace").decode()).strip()


def _list(root: Path) -> Listing:
    folders = {folder.name.casefold(): folder for folder in _folders(root)}
    test = next((folders[name] for name in _TESTS if name in folders), None)
    if test and _TRAIN in folders:
        listing = Listing({"train": folders[_TRAIN], "test": test})
        listing.unused = [folder.name for folder in folders.values() if folder not in listing.parts.values()]
        listing.stray += _images_in(root)
    else:
        listing = Listing({"all": root})
        listing.wrong += [_half(folders[name]) for name in (_TRAIN, *_TESTS) if _is_part(folders.get(name))]
    for part, folder in listing.parts.items():
        listing.stray += _images_in(folder)
        for class_folder in _folders(folder):
            _add_class(listing, part, class_folder)
    return listing


def _is_part(folder: Path | None) -> bool:
    """Tell a lone part, full of class folders, from a class that happens to be called ``train``."""
    return folder is not None and bool(_folders(folder)) and not _images_in(folder)


def _half(folder: Path) -> str:
    other = "test or val" if folder.name.casefold() == _TRAIN else _TRAIN
    return f"there is a folder {folder.name} but none called {other}; to split it, use folder:{folder}"


def _add_class(listing: Listing, part: str, folder: Path) -> None:
    try:
        images = [path for path in _walk(folder, {folder.resolve()}) if _is_image(path)]
    except OSError as error:
        listing.wrong.append(_said(error))
        return
    name = plain(folder.name)
    listing.classes[name].append(folder)
    for path in images:
        key = plain(path.relative_to(folder.parent).as_posix())
        listing.files.append(ImageFile(path, part, name, key))


def _walk(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files below ``folder`` by name, each real folder once: links cannot lead in a circle."""
    for entry in _entries(folder):
        if not entry.is_dir():
            yield entry
        elif (real := entry.resolve()) not in seen:
            seen.add(real)
            yield from _walk(entry, seen)


def _entries(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not _hidden(entry.name))


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_dir()]


def _images_in(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if not entry.is_dir() and _is_image(entry)]


def _is_image(path: Path) -> bool:
    # a link to nothing counts: reading it says what is wrong
    return path.suffix.lower() in SUFFIXES and (path.is_file() or path.is_symlink())


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _quoted(folders: list[Path]) -> str:
    return ", ".join(f"'{folder.parent.name}/{folder.name}'" for folder in folders)


def _said(error: OSError) -> str:
    return f"{error.filename}: {(error.strerror or str(error)).lower()}"
