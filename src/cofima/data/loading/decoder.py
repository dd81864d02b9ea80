"""Decoding of files, arrays, tensors and Pillow images to upright 8-bit RGB."""

import os
import stat
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from cofima.core.errors import CofimaError
from cofima.core.system import open_to_read

MOST_PIXELS = 100_000_000
MOST_BYTES = 1_000_000_000
# Without a list of formats, Pillow goes by the first bytes of a file, and runs Ghostscript for some of them.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
Decodable = bytes | NDArray[Any] | Tensor | Image.Image  # bytes of an encoded file


class BadImageError(CofimaError):
    """Error for an image that cannot be used, with the reason."""

    def __init__(self, reason: str, path: Path | None = None) -> None:
        super().__init__(reason if path is None else f"{path}: {reason}")
        self.reason = reason


def decode(content: Decodable) -> Image.Image:
    """Return an image (the first frame of several) as upright 8-bit RGB; transparency becomes white.

    Arrays are [H, W], [H, W, 1], [H, W, 3] or [H, W, 4], tensors [3, H, W] or [1, H, W]; integers range
    from 0 to 255, floats from 0 to 1.
    """
    if isinstance(content, bytes):
        return _from_file(content)
    if isinstance(content, Tensor):
        content = _from_tensor(content)
    return _rgb(_upright(_from_array(content) if isinstance(content, np.ndarray) else content))


def decode_file(path: Path) -> Image.Image:
    """Read and decode a file."""
    try:
        return decode(read_file(path))
    except (BadImageError, OSError) as error:
        raise BadImageError(fault_of(error), path) from error


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; raise for a pipe or a device, which may never end."""
    handle = open_to_read(path)
    try:
        about = os.fstat(handle)
        if stat.S_ISDIR(about.st_mode):
            raise BadImageError("a folder, not a file")
        if not stat.S_ISREG(about.st_mode):
            raise BadImageError("not a regular file, but a pipe, a socket or a device")
        if about.st_size > MOST_BYTES:
            raise BadImageError(f"{about.st_size / 1e9:,.1f} GB is more than 1 GB")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def open_image(file: Path | IO[bytes]) -> Image.Image:
    """Open an image in one of the supported formats; only its header is read."""
    return Image.open(file, formats=FORMATS)


def fault_of(error: BadImageError | OSError) -> str:
    """Return the reason of an error about an image, without its name."""
    return error.reason if isinstance(error, BadImageError) else (error.strerror or str(error)).lower()


def _from_file(content: bytes) -> Image.Image:
    try:
        with open_image(BytesIO(content)) as image:
            if image.width * image.height > MOST_PIXELS:
                raise BadImageError(f"{image.width} x {image.height} is more than 100 million pixels")
            image.load()
            return _rgb(_upright(image))
    except BadImageError:
        raise
    except Exception as error:  # decoders raise more than OSError on damaged bytes
        raise BadImageError(_reason(content, error)) from error


def _from_tensor(image: Tensor) -> NDArray[Any]:
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise BadImageError(f"a tensor image must be [3, H, W] or [1, H, W], not {list(image.shape)}")
    return np.asarray(image.detach().cpu().permute(1, 2, 0))


def _from_array(array: NDArray[Any]) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or 0 in array.shape:
        raise BadImageError(f"an array image must be [H, W], [H, W, 3] or [H, W, 4], not {list(array.shape)}")
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.floating):
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise BadImageError("an image of floats must lie between 0 and 1; give uint8 for 0 to 255")
        array = np.rint(array * 255).astype(np.uint8)
    if array.min() < 0 or array.max() > 255:
        raise BadImageError("an image of whole numbers must lie between 0 and 255")
    return Image.fromarray(np.ascontiguousarray(array.astype(np.uint8)))


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # an image with broken EXIF data is still readable
        return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode[0] in "IF":
        return Image.fromarray(_eight_bit(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _eight_bit(gray: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale 16-bit integers and floats in 0..1 by their range, anything larger by its own maximum."""
    values = np.nan_to_num(gray.astype(np.float64)).clip(0)
    white = 65535.0 if np.issubdtype(gray.dtype, np.integer) else 1.0
    eight_bit: NDArray[np.uint8] = np.rint(values * (255.0 / max(white, values.max()))).astype(np.uint8)
    return eight_bit


def _reason(content: bytes, error: Exception) -> str:
    if content == b"":
        return "empty file"
    if isinstance(error, Image.DecompressionBombError):
        return "more than 100 million pixels"
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or of an unknown format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = str(error)
    return "truncated" if "truncated" in text.lower() else f"damaged ({text or type(error).__name__})"
