"""Reading pictures, in threads, into the place where their pixels stay."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from cofima.data.forms import Form
from cofima.data.images import BadImageError, decode
from cofima.data.source import Picture

Content = bytes | NDArray[np.uint8]
Found = tuple[str, str]  # the hash of a picture's content, and what is wrong with it, if anything


def read(picture: Picture, use: Callable[[Image.Image], object]) -> Found:
    """Decode a picture and use it."""
    try:
        content = picture.read()
        use(opened(picture.name, content))
    except BadImageError as error:
        return "", error.reason
    except OSError as error:
        return "", (error.strerror or str(error)).lower()
    return hash_of(content), ""


def fill(
    pixels: Tensor, pictures: Sequence[Picture], places: Iterable[int], form: Form, pool: ThreadPoolExecutor
) -> Iterator[Found]:
    """Read the pictures at ``places`` to the same places of ``pixels``; yield what was found of each."""

    def place(at: int) -> Found:
        return read(pictures[at], lambda image: pixels[at].copy_(form.keep(image)))

    yield from pool.map(place, places)


def readers() -> ThreadPoolExecutor:
    """Return threads to read with; Pillow works on several images at once."""
    return ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1), thread_name_prefix="reading")


def opened(name: str, content: Content) -> Image.Image:
    """Return a picture as 8-bit RGB, upright, from an encoded file or from pixels [H, W, 3]."""
    if isinstance(content, bytes):
        return decode(Path(name), content)
    if content.dtype != np.uint8 or content.ndim != 3 or content.shape[2] != 3:
        raise BadImageError(
            Path(name), f"expected uint8 pixels [H, W, 3], found {content.dtype} {content.shape}"
        )
    return Image.fromarray(content)


def hash_of(content: Content) -> str:
    """Return the sha256 of a file, or of pixels and their shape."""
    if isinstance(content, bytes):
        return sha256(content).hexdigest()
    return sha256(str(content.shape).encode() + np.ascontiguousarray(content).tobytes()).hexdigest()


def small(pictures: Sequence[Picture], most: int) -> list[NDArray[np.uint8]] | None:
    """Return the pixels of all pictures if they are given as pixels, of one shape of at most ``most``.

    Such images are kept as they are, and enlarged when they are seen: CIFAR is 60 times smaller so.
    """
    found: list[NDArray[np.uint8]] = []
    for picture in pictures:
        content = picture.read()
        if isinstance(content, bytes) or content.dtype != np.uint8 or content.ndim != 3:
            return None
        found.append(content)
        if content.shape[2] != 3 or max(content.shape) > most or content.shape != found[0].shape:
            return None
    return found


def stacked(pictures: Sequence[NDArray[np.uint8]]) -> Tensor:
    """Return pictures of one shape [H, W, 3] as one tensor [N, 3, H, W]."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()
