"""Stored pixels give exactly torchvision's test preprocessing."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as tv

from cofima.data.loading.pixel_format import PixelFormat, resized_center

BICUBIC = tv.InterpolationMode.BICUBIC
FORM = PixelFormat(side=32, size=28, whole=38)


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.RandomState(seed).randint(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BILINEAR)


@pytest.mark.parametrize("shape", [(64, 64), (100, 75), (75, 100), (301, 64), (20, 20), (33, 170), (65, 64)])
def test_the_tested_picture_is_torchvisions_bit_for_bit(shape: tuple[int, int]) -> None:
    image = photo(*shape)
    expected = tv.Compose([tv.Resize(32, BICUBIC), tv.CenterCrop(28), tv.PILToTensor()])(image)
    assert torch.equal(FORM.decode_test(FORM.encode(image)[None])[0], expected)


def test_at_the_size_of_the_paper() -> None:
    image, form = photo(500, 375), PixelFormat(256, 224, 300)
    expected = tv.Compose([tv.Resize(256, BICUBIC), tv.CenterCrop(224), tv.PILToTensor()])(image)
    row = form.encode(image)[None]
    assert torch.equal(form.decode_test(row)[0], expected)
    squeezed = tv.Compose([tv.Resize((300, 300), BICUBIC), tv.PILToTensor()])(image)
    assert torch.equal(form.decode_train(row)[0][0], squeezed)


@pytest.mark.parametrize("shape", [(64, 50), (50, 64), (70_000, 1)])
def test_the_trained_picture_is_the_whole_squeezed_and_knows_its_shape(shape: tuple[int, int]) -> None:
    image = photo(*shape)
    pictures, shapes = FORM.decode_train(FORM.encode(image)[None])
    expected = tv.Compose([tv.Resize((38, 38), BICUBIC), tv.PILToTensor()])(image)
    assert torch.equal(pictures[0], expected)
    assert shapes.tolist() == [[shape[1], shape[0]]]


def test_a_thread_is_resized_only_where_it_is_seen() -> None:
    seen = resized_center(Image.new("RGB", (1_000_000, 1), (1, 2, 3)), 32, 28)
    assert seen.size == (28, 28)
    assert seen.getpixel((5, 5)) == (1, 2, 3)


def test_images_that_are_only_tested_take_less_room_and_are_seen_alike() -> None:
    less = PixelFormat(32, 28, 38, only_tested=True)
    image = photo(60, 44)
    assert less.bytes == FORM.bytes - 3 * 38**2
    assert torch.equal(FORM.decode_test(less.encode(image)[None]), FORM.decode_test(FORM.encode(image)[None]))


@pytest.mark.parametrize("form", [FORM, PixelFormat(32), PixelFormat(32, 28, 38, only_tested=True)])
def test_what_is_kept_has_the_shape_that_is_said(form: PixelFormat) -> None:
    kept = form.encode(photo(40, 50))
    assert (tuple(kept.shape), kept.dtype) == (form.shape, torch.uint8)
    assert kept.numel() == form.bytes
