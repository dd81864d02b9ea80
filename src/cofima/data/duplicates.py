"""Detection of exact and near duplicates between two sets of images.

Near duplicates are images that were saved again, resized, or taken in one burst. A perceptual hash (the signs
of brightness differences between neighbors in a 16 x 16 thumbnail) selects candidates, which are then
compared by their thumbnails.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from cofima.core.errors import CofimaError, CofimaWarning
from cofima.core.wording import count, some
from cofima.data.loading.pixel_format import PixelFormat
from cofima.data.sources.listing import LabeledImages

SIDE = 16  # pixels per side of a thumbnail
_SHARE = 0.2  # maximum share of different bits: in flat regions, they are noise
_MEAN, _MOST = 6.0, 60.0  # mean and maximum difference of the fields of thumbnails, in levels of 255
_AT_ONCE = 256


@dataclass(frozen=True)
class Duplicate:
    """Test image that is a copy of a training image."""

    name: str
    of: str
    exact: bool

    def __str__(self) -> str:
        return f"{self.name} {'is' if self.exact else 'is nearly'} {self.of}"


@dataclass(frozen=True, eq=False)
class Looks:
    """Names, content hashes and thumbnails (uint8 [N, 3, 16, 16]) of images."""

    names: Sequence[str]
    hashes: Sequence[str]
    thumbnails: Tensor


def duplicates(tested: Looks, learned: Looks) -> list[Duplicate]:
    """Return the test images that are copies of a training image, each once."""
    same = dict(zip(learned.hashes, learned.names, strict=True))
    near = nearest(tested.thumbnails, learned.thumbnails)
    found = []
    for name, digest, place in zip(tested.names, tested.hashes, near, strict=True):
        if digest and digest in same:
            found.append(Duplicate(name, same[digest], True))
        elif place is not None:
            found.append(Duplicate(name, learned.names[place], False))
    return found


def nearest(tested: Tensor, learned: Tensor) -> list[int | None]:
    """Return, for each test thumbnail, the index of the first near duplicate, or None."""
    found: list[int | None] = []
    bits, fields = _bits(learned), learned.flatten(1).float()
    least = bits.shape[1] * (1 - 2 * _SHARE)  # the dot product of two rows is agreeing minus differing bits
    for start in range(0, len(tested), _AT_ONCE):
        part = tested[start : start + _AT_ONCE]
        alike = _bits(part) @ bits.T >= least
        for own, candidates in zip(part.flatten(1).float(), alike, strict=True):
            places = candidates.nonzero().flatten()
            apart = (fields[places] - own).abs()
            close = places[(apart.mean(1) <= _MEAN) & (apart.amax(1) <= _MOST)] if len(places) else places
            found.append(int(close[0]) if len(close) else None)
    return found


def thumbnails(pixels: Tensor) -> Tensor:
    """Return the thumbnails of images, uint8 [N, 3, H, W]."""
    small = torch.empty(len(pixels), 3, SIDE, SIDE, dtype=torch.uint8)
    for start in range(0, len(pixels), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        small[part] = adaptive_avg_pool2d(pixels[part].float(), SIDE).round().to(torch.uint8)
    return small


def thumbnail(image: Image.Image) -> Tensor:
    """Return the thumbnail of one image, uint8 [3, 16, 16]."""
    return torch.from_numpy(np.array(image.resize((SIDE, SIDE), Image.Resampling.BOX))).permute(2, 0, 1)


def warn_of_copies(read: LabeledImages, pixel_format: PixelFormat, held_out: Tensor) -> None:
    """Warn about held-out photographs that are copies of training photographs, and those in two classes."""
    small = thumbnails(pixel_format.decode_test(read.pixels) if pixel_format.whole else read.pixels)

    def looks(mask: Tensor) -> Looks:
        places = mask.nonzero().flatten().tolist()
        names = [read.files[at].name for at in places]
        return Looks(names, [read.hashes[at] for at in places], small[mask])

    # a first answer is taught by all images but a test part's, also by those held out of fine-tuning
    found = duplicates(looks(held_out & ~read.tested), looks(~held_out & ~read.tested))
    found += duplicates(looks(read.tested), looks(~read.tested))
    if found:
        warnings.warn(
            f"{count(len(found), 'held-out photograph')} can be found among those to train on, so accuracy "
            f"will look too high: {some([str(one) for one in found])}",
            CofimaWarning,
            stacklevel=3,
        )
    if twice := _in_two_classes(read):
        warnings.warn(
            f"the same photograph is in two classes, one of which must be wrong: {some(twice)}",
            CofimaWarning,
            stacklevel=3,
        )


def _in_two_classes(read: LabeledImages) -> list[str]:
    """Return the files that have the content of a file of another class before them."""
    first: dict[str, int] = {}
    found = []
    for place, digest in enumerate(read.hashes):
        at = first.setdefault(digest, place)
        if digest and read.files[at].class_name != read.files[place].class_name:
            found.append(f"{read.files[place].name} is {read.files[at].name}")
    return found


def refuse_model_among_photos(photos: Path, folder: Path) -> None:
    """Raise if a model would be written into the folder of its training photographs."""
    inside, outside = folder.resolve(), photos.resolve()
    if photos.is_dir() and (inside == outside or outside in inside.parents):
        raise CofimaError(
            f"{folder}: the model would lie among the photographs of {photos}, and be read as a class next "
            "time; choose a folder outside of it"
        )


def _bits(small: Tensor) -> Tensor:
    """Return the perceptual hash of thumbnails: 1 if the next pixel to the right is brighter, else -1."""
    gray = small.float().mean(1)
    return ((gray[:, :, 1:] > gray[:, :, :-1]).float() * 2 - 1).flatten(1)
