"""Photographs with the names of their classes: a folder per class, or a CSV file of paths and labels."""

import csv
import warnings
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from cofima.data.deal import shuffled
from cofima.data.files import ImageFile, list_images, plain
from cofima.data.forms import Form
from cofima.errors import CofimaError, CofimaWarning, problems
from cofima.progress import SILENT, Progress
from cofima.serve.decode import decoded

SHOWN = 20
LEAST_TO_HOLD_OUT = 5


@dataclass(frozen=True, eq=False)
class Found:
    """Images that were found and not read yet."""

    source: Path
    files: tuple[ImageFile, ...]

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes, sorted."""
        return sorted({file.class_name for file in self.files})

    def only(self, part: str) -> "Found":
        """Return the files of a part, or all where the source has no parts."""
        mine = tuple(file for file in self.files if file.part in (part, "all"))
        return Found(self.source, mine)


@dataclass(frozen=True, eq=False)
class Photos:
    """Images in memory: uint8 pixels in one form, and the file of each with a hash of it."""

    source: Path
    pixels: Tensor
    files: tuple[ImageFile, ...]
    hashes: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.files)

    def labels(self, classes: list[str]) -> Tensor:
        """Return the place of each image's class in ``classes``."""
        number = {name: place for place, name in enumerate(classes)}
        return torch.tensor([number[file.class_name] for file in self.files], dtype=torch.int64)

    def held_out(self, share: float, seed: int) -> Tensor:
        """Return which images are not trained on: the test part, or a share of each class of five or more.

        An image that is there twice is never held out: its copy would have been trained on.
        """
        often = Counter(self.hashes)
        chosen = torch.tensor([file.part == "test" for file in self.files])
        for name in {file.class_name for file in self.files}:
            mine = [at for at, f in enumerate(self.files) if f.class_name == name and f.part == "all"]
            once = [at for at in mine if often[self.hashes[at]] == 1]
            if not share or len(mine) < LEAST_TO_HOLD_OUT:
                continue
            order = shuffled([self.files[at].key for at in once], seed)
            for place in order[: max(1, round(share * len(mine)))]:
                chosen[once[place]] = True
        return chosen


def find_photos(source: Path) -> Found:
    """List the images of a folder or a CSV file; everything that is wrong with it is one error."""
    if source.is_dir():
        found, wrong = _folder(source)
    elif source.suffix.lower() == ".csv" and source.is_file():
        found, wrong = _csv(source)
    elif source.exists():
        raise CofimaError(f"{source}: expected a folder with a folder per class, or a CSV file (path,label)")
    else:
        raise CofimaError(f"{source}: there is no such folder or file")
    if wrong:
        raise _listed(source, wrong)
    return found


def read_photos(found: Found, form: Form, *, skip_bad: bool = False, progress: Progress = SILENT) -> Photos:
    """Decode the images; unreadable ones are one error, or are left out and counted in a warning."""
    pixels = torch.empty(len(found.files), *form.shape, dtype=torch.uint8)
    hashes, faults = [], []
    paths = [file.path for file in found.files]
    for at, (image, content, fault) in enumerate(
        progress.track(decoded(paths, form), len(paths), "reading images")
    ):
        if image is not None:
            pixels[at] = image
        hashes.append(sha256(content).digest())
        faults.append(fault)
    bad = [f"{path}: {fault}" for path, fault in zip(paths, faults, strict=True) if fault]
    good = [at for at, fault in enumerate(faults) if not fault]
    left = {found.files[at].class_name for at in good}
    lost = [f"class '{name}': no image of it can be read" for name in found.classes if name not in left]
    if bad and (not skip_bad or lost):
        raise _listed(found.source, lost + bad)
    if bad:
        warnings.warn(f"{found.source}: left out {len(bad)} unreadable image(s)", CofimaWarning, stacklevel=3)
        pixels = pixels[good]
    return Photos(
        found.source, pixels, tuple(found.files[at] for at in good), tuple(hashes[at] for at in good)
    )


def _folder(source: Path) -> tuple[Found, list[str]]:
    listing = list_images(source)
    having = {file.class_name for file in listing.files}
    empty = [f"class '{name}': no images" for name in sorted(listing.classes) if name not in having]
    return Found(source, tuple(listing.files)), [*listing.wrong, *listing.duplicates(), *empty]


def _csv(source: Path) -> tuple[Found, list[str]]:
    """Read rows of path and label; paths are relative to the file's own folder."""
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
            columns = rows[0].keys() if rows else set()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CofimaError(f"{source}: not a CSV file in UTF-8 ({error})") from error
    if not {"path", "label"} <= columns:
        raise CofimaError(f"{source}: the first line must name the columns path and label, e.g. path,label")
    files, wrong = [], []
    for number, row in enumerate(rows, start=2):
        path, label = (row["path"] or "").strip(), plain(row["label"] or "")
        if not path or not label:
            wrong.append(f"line {number}: {'label' if path else 'path'} is empty")
        elif not (source.parent / path).is_file():
            wrong.append(f"line {number}: there is no file {source.parent / path}")
        else:
            files.append(ImageFile(source.parent / path, "all", label, plain(f"{label}/{path}")))
    return Found(source, tuple(files)), wrong


def _listed(source: Path, found: list[str]) -> CofimaError:
    lines = str(problems(str(source), found)).split("\n")
    more = [f"  ... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return CofimaError("\n".join(lines[: 1 + SHOWN] + more))
