"""Every kind of image file becomes upright 8-bit RGB, or says plainly why not."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from cofima.data.loading.decoder import BadImageError, decode, decode_file
from cofima.data.loading.loader import Sample, decode_all, load
from cofima.data.loading.pixel_format import PixelFormat, center_square


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth gradients, edges and a little noise, as in a photograph."""
    random = np.random.RandomState(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (7 + c)) + np.cos(y / (11 - c)) + (x > width / 2) for c in range(3)]
    values = 128 + 40 * np.stack(waves, 2) + random.normal(0, 6, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def saved(image: Image.Image, path: Path, **options: object) -> Image.Image:
    image.save(path, **options)
    return decode_file(path)


def test_rgb_survives_unchanged(tmp_path: Path) -> None:
    image = photo(13, 9)
    assert np.array_equal(saved(image, tmp_path / "a.png"), image)


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    image = photo(20, 10)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to view
    upright = saved(image, tmp_path / "a.png", exif=exif)
    assert upright.size == (10, 20)
    assert np.array_equal(upright, np.rot90(np.asarray(image), -1))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_shows_the_same_picture(tmp_path: Path, orientation: int) -> None:
    shown = np.asarray(photo(20, 12))
    kept = {  # what a camera stores, so that the tag brings it back
        1: shown,
        2: shown[:, ::-1],
        3: shown[::-1, ::-1],
        4: shown[::-1],
        5: shown.swapaxes(0, 1),
        6: np.rot90(shown, 1),
        7: np.rot90(shown, 2).swapaxes(0, 1),
        8: np.rot90(shown, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = saved(Image.fromarray(np.ascontiguousarray(kept)), tmp_path / "a.png", exif=exif)
    assert np.array_equal(upright, shown)


def test_broken_exif_does_not_lose_the_picture(tmp_path: Path) -> None:
    image = photo(8, 8)
    assert np.array_equal(saved(image, tmp_path / "a.png", exif=b"Exif\x00\x00MM\x00*\xff\xff"), image)


def test_alpha_is_laid_on_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (100, 0, 0, 0))
    image.putpixel((1, 0), (100, 0, 0, 255))
    got = saved(image, tmp_path / "a.png")
    assert [got.getpixel((0, 0)), got.getpixel((1, 0))] == [(255, 255, 255), (100, 0, 0)]


def test_grey_with_alpha_is_laid_on_white(tmp_path: Path) -> None:
    got = saved(Image.new("LA", (2, 2), (10, 0)), tmp_path / "a.png")
    assert got.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(("transparent", "color"), [(False, (200, 30, 40)), (True, (255, 255, 255))])
def test_palette_and_its_transparent_entry(
    tmp_path: Path, transparent: bool, color: tuple[int, int, int]
) -> None:
    image = Image.new("P", (3, 3), 1)
    image.putpalette([0, 0, 0, 200, 30, 40])
    got = saved(image, tmp_path / "a.png", **({"transparency": 1} if transparent else {}))
    assert got.getpixel((1, 1)) == color


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    got = saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), tmp_path / "a.jpg", quality=100)
    red, green, blue = got.getpixel((8, 8))
    assert (got.mode, red > 240, green < 15, blue < 15) == ("RGB", True, True, True)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_keep_their_brightness(tmp_path: Path, suffix: str) -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    got = saved(Image.fromarray(values), tmp_path / f"a.{suffix}")
    assert np.array_equal(np.asarray(got)[0, :, 0], [0, 1, 128, 255])
    assert got.mode == "RGB"


def test_sixteen_bits_of_the_other_byte_order(tmp_path: Path) -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=">u2")
    header = b"P5 4 1 65535\n"  # PGM is big-endian
    (tmp_path / "a.pgm").write_bytes(header + values.tobytes())
    assert np.asarray(decode_file(tmp_path / "a.pgm"))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_ycbcr_becomes_rgb() -> None:
    got = decode(Image.new("RGB", (4, 4), (200, 30, 40)).convert("YCbCr"))
    assert got.mode == "RGB"
    assert np.abs(np.asarray(got).astype(int)[0, 0] - [200, 30, 40]).max() <= 2


def test_float_tiff_in_unit_range(tmp_path: Path) -> None:
    got = saved(Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32)), tmp_path / "a.tiff")
    assert np.asarray(got)[0, :, 1].tolist() == [0, 128, 255]


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_has_three_equal_channels(tmp_path: Path, mode: str) -> None:
    got = np.asarray(saved(photo(9, 9).convert(mode), tmp_path / "a.png"))
    assert got.shape == (9, 9, 3)
    assert (got == got[:, :, :1]).all()
    assert got.std() > 0


def test_animated_gif_gives_its_first_frame(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (4, 4), (255, 0, 0)), Image.new("RGB", (4, 4), (0, 0, 255))
    got = saved(first, tmp_path / "a.gif", save_all=True, append_images=[second])
    assert got.getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "tif", "gif"])
def test_half_a_file_is_refused_with_a_reason(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    photo(64, 64).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadImageError, match=r"truncated|damaged|not an image") as caught:
        decode_file(path)
    assert str(caught.value) == f"{path}: {caught.value.reason}"


def test_truncated_jpeg_is_called_truncated(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    photo(64, 64).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(BadImageError, match="truncated"):
        decode_file(path)


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("hello")
    for name, reason in [("empty", "empty file"), ("text", "not an image"), ("none", "no such file")]:
        with pytest.raises(BadImageError, match=reason):
            decode_file(tmp_path / f"{name}.jpg")


def test_huge_images_are_refused_before_decoding(tmp_path: Path) -> None:
    Image.new("1", (20000, 10000)).save(tmp_path / "huge.png")
    with pytest.raises(BadImageError, match="100 million pixels"):
        decode_file(tmp_path / "huge.png")


def test_the_limit_is_ours_not_only_pillows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cofima.data.loading.decoder.MOST_PIXELS", 99)
    Image.new("L", (10, 10)).save(tmp_path / "a.png")
    with pytest.raises(BadImageError, match="10 x 10"):
        decode_file(tmp_path / "a.png")


@pytest.mark.parametrize("size", [(64, 64), (100, 75), (75, 100), (301, 64), (20, 20), (33, 170), (65, 64)])
def test_fit_is_resize_and_center_crop(size: tuple[int, int]) -> None:
    image = photo(*size)
    resized = Resize(64, InterpolationMode.BICUBIC, antialias=True)(image)
    expected = torch.from_numpy(np.array(CenterCrop(64)(resized))).permute(2, 0, 1)
    got = center_square(image, 64)
    assert got.shape == (3, 64, 64)
    assert got.is_contiguous()
    difference = (got.int() - expected.int()).abs()
    assert difference.max() <= 2  # Pillow may resample rows or columns first, and rounds in between


def test_fit_of_a_thread_costs_no_more_than_its_crop() -> None:
    assert center_square(Image.new("RGB", (1_000_000, 1), (1, 2, 3)), 64)[:, 5, 5].tolist() == [1, 2, 3]


def test_a_format_that_is_not_on_the_list_is_not_even_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr("subprocess.check_call", lambda *words, **_: started.append(words))
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")  # as where Ghostscript is installed
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "a.jpg").write_bytes(eps)
    with pytest.raises(BadImageError, match="not an image, or of an unknown format"):
        decode_file(tmp_path / "a.jpg")
    assert not started
    photo(8, 8).save(tmp_path / "b.ico")
    with pytest.raises(BadImageError, match="unknown format"):
        decode_file(tmp_path / "b.ico")


def test_pipes_devices_folders_and_huge_files_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "link.jpg").symlink_to(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "folder.jpg").mkdir()
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(2**40)
    expected = {
        "pipe": "a pipe",
        "link": "a pipe",
        "zero": "a device",
        "folder": "a folder",
        "huge": "1,099.5 GB",
    }
    for name, reason in expected.items():
        with pytest.raises(BadImageError, match=reason):
            decode_file(tmp_path / f"{name}.jpg")
        path = tmp_path / f"{name}.jpg"
        (found,) = decode_all([path], PixelFormat(8))
        assert reason in found.fault
        loaded = load([Sample("a", 0, path.read_bytes)], PixelFormat(8))
        assert reason in loaded.faults[0]
