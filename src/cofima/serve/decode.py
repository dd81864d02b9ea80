"""Whatever holds an image becomes uint8 pixels of one form: files, Pillow images, arrays, tensors."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from cofima.data.forms import Form
from cofima.data.images import BadImageError, as_rgb, decode
from cofima.errors import CofimaError

ImageLike = str | Path | Image.Image | NDArray[Any] | Tensor
Decoded = tuple[Tensor | None, bytes, str]
AHEAD = 64  # files decoded before they are asked for


def decoded(paths: Iterable[Path], form: Form) -> Iterator[Decoded]:
    """Yield pixels, content and fault of each file in order, decoded by threads a little ahead."""

    def read(path: Path) -> Decoded:
        try:
            content = path.read_bytes()
            return form.keep(decode(path, content)), content, ""
        except BadImageError as error:
            return None, b"", error.reason
        except OSError as error:
            return None, b"", (error.strerror or str(error)).lower()

    pool = ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1))
    waiting: deque[Future[Decoded]] = deque()
    try:
        for path in paths:
            waiting.append(pool.submit(read, path))
            if len(waiting) >= AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def several(images: ImageLike | Sequence[ImageLike]) -> list[ImageLike]:
    """Return images one by one: a single one, a sequence, or an array or tensor with one more dimension."""
    if isinstance(images, np.ndarray | Tensor):
        return list(images) if images.ndim == 4 else [images]
    if isinstance(images, str | Path | Image.Image):
        return [images]
    return list(images)


def pixels_of(image: Image.Image | NDArray[Any] | Tensor, form: Form) -> Tensor:
    """Return what is kept of an image in memory.

    Arrays are [H, W], [H, W, 3] or [H, W, 4], tensors [3, H, W] or [1, H, W]; whole numbers count to
    255, floats to 1.
    """
    if isinstance(image, Tensor):
        if image.ndim != 3 or image.shape[0] not in (1, 3):
            raise CofimaError(f"a tensor image must be [3, H, W] or [1, H, W], not {list(image.shape)}")
        image = np.asarray(image.detach().cpu().permute(1, 2, 0))
    if isinstance(image, np.ndarray):
        image = _from_array(image)
    return form.keep(as_rgb(image))


def _from_array(array: NDArray[Any]) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or 0 in array.shape:
        raise CofimaError(f"an array image must be [H, W], [H, W, 3] or [H, W, 4], not {list(array.shape)}")
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.floating):
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise CofimaError("an image of floats must lie between 0 and 1; give uint8 for 0 to 255")
        array = np.rint(array * 255).astype(np.uint8)
    if array.min() < 0 or array.max() > 255:
        raise CofimaError("an image of whole numbers must lie between 0 and 255")
    return Image.fromarray(np.ascontiguousarray(array.astype(np.uint8)))
