"""Listing of images in class folders, with or without train and test parts, or in a CSV file.

Used for datasets in folders, and for the inputs of ``learn``, ``extend`` and ``evaluate``.
"""

import csv
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from cofima.core.errors import CofimaError, CofimaWarning, file_error, first_problems, problems
from cofima.core.names import name_fault, shortened
from cofima.core.progress import SILENT, Progress
from cofima.data.image_set import ImageSet, image_set
from cofima.data.loading.loader import Sample, load
from cofima.data.loading.pixel_format import PixelFormat
from cofima.data.sources.base import counted
from cofima.data.splits import choose_per_class, every_other

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
MIN_TO_HOLD_OUT = 5
TRAIN, TESTS = "train", ("test", "val")  # names of folders


@dataclass(frozen=True)
class ImageFile:
    """Image file with its class and part: ``train``, ``test``, or ``all`` for an unsplit folder."""

    path: Path
    part: str
    class_name: str
    key: str  # path below the part, the same on every machine

    @property
    def name(self) -> str:
        """Path below the folder; ``val`` is renamed to ``test``."""
        return self.key if self.part == "all" else f"{self.part}/{self.key}"


@dataclass
class Listing:
    """Images of a folder or a CSV file, not read yet."""

    path: Path
    parts: dict[str, Path]
    folders: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))  # by class
    files: list[ImageFile] = field(default_factory=list)
    stray: list[Path] = field(default_factory=list)  # images outside the class folders
    unused: list[str] = field(default_factory=list)  # folders other than train and test
    wrong: list[str] = field(default_factory=list)  # problems that cannot be skipped

    @property
    def unsplit(self) -> bool:
        """True if there are no separate training and test parts."""
        return "all" in self.parts

    @property
    def classes(self) -> list[str]:
        """Sorted names of the classes with images."""
        return sorted({file.class_name for file in self.files})

    def only(self, part: str) -> "Listing":
        """Return the listing with the files of one part, or all files if there are no parts."""
        return replace(self, files=[file for file in self.files if file.part in (part, "all")])

    def of(self, classes: Collection[str]) -> "Listing":
        """Return the listing with the files of these classes."""
        wanted = set(classes)
        return replace(self, files=[file for file in self.files if file.class_name in wanted])

    def read(
        self, pixel_format: PixelFormat, *, skip_unreadable: bool = False, progress: Progress = SILENT
    ) -> "LabeledImages":
        """Read the images into memory; raise one error for all unreadable ones, or skip them and warn."""
        samples = [Sample(file.name, 0, file.path.read_bytes) for file in self.files]
        # never cached on disk: users may have to delete their photographs after training
        loaded = load(samples, pixel_format, on_disk=False, progress=progress)
        bad = [f"{file.path}: {f}" for file, f in zip(self.files, loaded.faults, strict=True) if f]
        good = [at for at, fault in enumerate(loaded.faults) if not fault]
        left = {self.files[at].class_name for at in good}
        lost = [f"class '{name}': no image of it can be read" for name in self.classes if name not in left]
        if bad and (not skip_unreadable or lost):
            raise first_problems(str(self.path), lost + bad)
        if bad:
            text = f"{self.path}: left out {counted(len(bad), 'unreadable image')}"
            warnings.warn(text, CofimaWarning, stacklevel=3)
        pixels = loaded.pixels[good] if bad else loaded.pixels
        return LabeledImages(pixels, [self.files[at] for at in good], [loaded.hashes[at] for at in good])


@dataclass(frozen=True, eq=False)
class Split:
    """Training images, held-out images for model selection, and images for the reported accuracy.

    Attributes:
        train: Training images.
        choose: Held-out images for decisions such as early stopping.
        report: Images on which accuracy is reported.
        tested: True if ``report`` is the user's own test set, which must not influence training.
        copied: Rows of pixels of images that occur more than once.
    """

    train: ImageSet
    choose: ImageSet
    report: ImageSet
    tested: bool = False
    copied: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True, eq=False)
class LabeledImages:
    """In-memory images: uint8 pixels in one format, with the file and content hash of each."""

    pixels: Tensor
    files: list[ImageFile]
    hashes: list[str]

    def __len__(self) -> int:
        return len(self.files)

    def images(self, classes: list[str]) -> ImageSet:
        """Return the images, labeled by the index of their class in ``classes``."""
        return image_set(self.pixels, self.labels(classes))

    def split(self, names: Collection[str], classes: list[str], share: float, seed: int) -> Split:
        """Split the images of the classes ``names``, labeled as in ``classes``.

        If there is a test part, accuracy is reported on it, and a held-out share of the rest is for model
        selection; otherwise the two alternate among the held-out share.
        """
        wanted, images = set(names), self.images(classes)
        mine = torch.tensor([file.class_name in wanted for file in self.files], dtype=torch.bool)
        held, test = self.held_out(share, seed), self.tested
        choose = held if test.any() else every_other(images.labels, held)
        report = test if test.any() else held & ~choose
        parts = (~(choose | report), choose, report)
        often = Counter(self.hashes)
        copied = torch.tensor([at for at, hashed in enumerate(self.hashes) if often[hashed] > 1])
        train, may_choose, reported = (images.select(mine & part) for part in parts)
        return Split(train, may_choose, reported, bool(test.any()), copied.long())

    def labels(self, classes: list[str]) -> Tensor:
        """Return the index of each image's class in ``classes``; -1 if it is not among them."""
        number = {name: place for place, name in enumerate(classes)}
        return torch.tensor([number.get(file.class_name, -1) for file in self.files], dtype=torch.int64)

    @property
    def tested(self) -> Tensor:
        """Mask of the test part."""
        return torch.tensor([file.part == "test" for file in self.files], dtype=torch.bool)

    def held_out(self, share: float, seed: int) -> Tensor:
        """Return a mask of held-out images: a share of each class of five or more, without the test part.

        An image that occurs twice is never held out, since its copy could be a training image.
        """
        often = Counter(self.hashes)
        chosen = choose_per_class(
            [file.key for file in self.files],
            [(file.part, file.class_name) for file in self.files],
            lambda count: max(1, round(share * count)) if share and count >= MIN_TO_HOLD_OUT else 0,
            seed,
            eligible=[often[hashed] == 1 and file.part != "test" for hashed, file in self._hashed()],
        )
        return torch.tensor(chosen, dtype=torch.bool)

    def _hashed(self) -> Iterator[tuple[str, ImageFile]]:
        return zip(self.hashes, self.files, strict=True)


def find_images(path: Path) -> Listing:
    """List the images of a folder or a CSV file; raise one error that lists all problems."""
    if path.is_dir():
        listing = list_images(path)
    elif path.suffix.lower() == ".csv" and path.is_file():
        listing = _list_csv(path)
    elif path.exists():
        raise CofimaError(f"{path}: expected a folder with a folder per class, or a CSV file (path,label)")
    else:
        raise CofimaError(f"{path}: there is no such folder or file")
    empty = sorted(listing.folders.keys() - set(listing.classes))
    if wrong := [*listing.wrong, *(f"class '{name}': no images" for name in empty)]:
        raise first_problems(str(path), wrong)
    return listing


def list_images(root: Path, where: str = "") -> Listing:
    """List the images below ``root``: ``train/`` and ``test/`` (or ``val/``), or one folder per class.

    If ``where`` is given, problems of the folder raise an error with this title; otherwise they are left to
    the caller.
    """
    try:
        listing = _list(root)
    except OSError as error:
        raise file_error(error.filename, error) from error
    if not listing.folders and not listing.wrong:
        raise CofimaError(f"{root} has no classes: put the images of each class into a folder of its own")
    if where and listing.wrong:
        raise problems(where, listing.wrong)
    return listing


def normalize_name(name: str) -> str:
    """Normalize a name: composed Unicode, no surrounding whitespace, no undecodable bytes."""
    return unicodedata.normalize("NFC", name.encode("utf-8", "replace").decode()).strip()


def _list(root: Path) -> Listing:
    folders = {folder.name.casefold(): folder for folder in _folders(root)}
    test = next((folders[name] for name in TESTS if name in folders), None)
    if test and TRAIN in folders:
        listing = Listing(root, {"train": folders[TRAIN], "test": test})
        listing.unused = [folder.name for folder in folders.values() if folder not in listing.parts.values()]
        listing.stray += _images_in(root)
    else:
        listing = Listing(root, {"all": root})
        listing.wrong += [_half(folders[name]) for name in (TRAIN, *TESTS) if _is_part(folders.get(name))]
    for part, folder in listing.parts.items():
        listing.stray += _images_in(folder)
        for class_folder in _folders(folder):
            _add_class(listing, part, class_folder)
    listing.wrong += _duplicate_class_names(listing)
    return listing


def _list_csv(path: Path) -> Listing:
    """List the rows of path and label of a CSV file; paths are relative to its folder."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
            columns = rows[0].keys() if rows else set()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CofimaError(f"{path}: not a CSV file in UTF-8 ({error})") from error
    if not {"path", "label"} <= columns:
        raise CofimaError(f"{path}: the first line must name the columns path and label, e.g. path,label")
    listing = Listing(path, {"all": path.parent})
    for number, row in enumerate(rows, start=2):
        image, label = (row["path"] or "").strip(), normalize_name(row["label"] or "")
        if not image or not label:
            listing.wrong.append(f"line {number}: {'label' if image else 'path'} is empty")
        elif fault := name_fault(label):
            listing.wrong.append(f"line {number}: class '{shortened(label)}': {fault}")
        elif not (path.parent / image).is_file():
            listing.wrong.append(f"line {number}: there is no file {path.parent / image}")
        else:
            listing.files.append(
                ImageFile(path.parent / image, "all", label, normalize_name(f"{label}/{image}"))
            )
    return listing


def _duplicate_class_names(listing: Listing) -> list[str]:
    """Return a problem for each class name with more than one spelling."""
    spellings: dict[str, list[Path]] = defaultdict(list)
    for name, folders in listing.folders.items():
        spellings[name.casefold()] += folders
    return [
        f"duplicate class names, the same but for case, spaces or Unicode form: {_quoted(folders)}"
        for _, folders in sorted(spellings.items())
        if len({folder.name for folder in folders}) > 1
    ]


def _is_part(folder: Path | None) -> bool:
    """Return True for a single part with class folders; False for a class that is named ``train``."""
    return folder is not None and bool(_folders(folder)) and not _images_in(folder)


def _half(folder: Path) -> str:
    other = "test or val" if folder.name.casefold() == TRAIN else TRAIN
    return f"there is a folder {folder.name} but none called {other}; to split it, use folder:{folder}"


def _add_class(listing: Listing, part: str, folder: Path) -> None:
    try:
        images = [path for path in _walk(folder, {folder.resolve()}) if _is_image(path)]
    except OSError as error:
        listing.wrong.append(str(file_error(error.filename, error)))
        return
    name = normalize_name(folder.name)
    if fault := name_fault(name):
        listing.wrong.append(f"class '{shortened(name)}': {fault}")
    listing.folders[name].append(folder)
    for path in images:
        key = normalize_name(path.relative_to(folder.parent).as_posix())
        listing.files.append(ImageFile(path, part, name, key))


def images_below(folder: Path) -> list[Path]:
    """Return the images at any depth below a folder, following links."""
    try:
        return [path for path in _walk(folder, {folder.resolve()}) if _is_image(path)]
    except OSError as error:
        raise file_error(error.filename, error) from error


def _walk(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files below ``folder`` by name; each real folder is visited once, so links cannot cycle."""
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
    # broken links are included, so that reading them reports the problem
    return path.suffix.lower() in SUFFIXES and (path.is_file() or path.is_symlink())


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _quoted(folders: list[Path]) -> str:
    return ", ".join(f"'{folder.parent.name}/{folder.name}'" for folder in folders)
