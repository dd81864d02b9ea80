"""Views against torchvision on the original image, and what chance may change."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as tv
from torchvision.transforms.functional import resized_crop

from cofima.data.loading.pixel_format import center_square
from cofima.data.transforms import View, crop_and_resize, crop_boxes

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BICUBIC = tv.InterpolationMode.BICUBIC


def photo(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (7 + c)) + np.cos(y / (11 - c)) + (x > width / 2) for c in range(3)]
    noise = np.random.RandomState(0).normal(0, 6, (height, width, 3))
    return Image.fromarray((128 + 40 * np.stack(waves, 2) + noise).clip(0, 255).astype(np.uint8))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pixels(count: int, side: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator(9))


@pytest.mark.parametrize(("size", "crop_pct"), [(224, 0.875), (224, 0.9), (64, 1.0), (64, 0.875)])
@pytest.mark.parametrize("shape", [(300, 300), (500, 375), (375, 500)])
def test_test_view_is_resize_and_center_crop_of_the_original(
    size: int, crop_pct: float, shape: tuple[int, int]
) -> None:
    image, stored = photo(*shape), int(size / crop_pct)
    expected = tv.Compose([tv.Resize(stored, BICUBIC, antialias=True), tv.CenterCrop(size), tv.PILToTensor()])
    view = View(size, stored, (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))
    got = view.test(center_square(image, stored)[None])[0]
    assert got.shape == (3, size, size)
    difference = (got - expected(image)).abs()
    assert difference.max() <= 2.01  # rows or columns first: 8-bit rounding in between differs
    assert difference.mean() < 0.3  # and no pixel is displaced


def test_normalization_is_that_of_torchvision() -> None:
    image = pixels(2, 8)
    expected = tv.Normalize(MEAN, STD)(image / 255)
    torch.testing.assert_close(View(8, 8, MEAN, STD).test(image), expected)
    assert View(8, 8, MEAN, STD).test(image).dtype == torch.float32


def test_without_crop_and_flip_training_sees_what_testing_sees() -> None:
    view, images, chance = View(6, 8, MEAN, STD), pixels(4, 8), generator()
    before = chance.get_state()
    assert torch.equal(view.train(images, chance), view.test(images))
    assert torch.equal(chance.get_state(), before)


def test_flip_mirrors_about_half_of_the_images_and_nothing_else() -> None:
    view, images = View(6, 8, MEAN, STD, flip=True), pixels(200, 8)
    seen, plain = view.train(images, generator()), view.test(images)
    same = (seen == plain).all(3).all(2).all(1)
    mirrored = (seen == plain.flip(3)).all(3).all(2).all(1)
    assert (same ^ mirrored).all()
    assert 70 < mirrored.sum() < 130


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_each_crop_is_torchvisions_resized_crop(interpolation: str) -> None:
    images = torch.stack([center_square(photo(90 + 10 * i, 80), 48) for i in range(5)])
    boxes = crop_boxes(torch.tensor([48, 48]).expand(5, 2), 0.3, generator())
    got = crop_and_resize(images, boxes, 32, interpolation)
    for image, box, crop in zip(images, boxes.tolist(), got, strict=True):
        pil = tv.ToPILImage()(image)
        expected = resized_crop(pil, *box, [32, 32], tv.InterpolationMode(interpolation))
        assert (crop.int() - tv.PILToTensor()(expected).int()).abs().max() <= 1


@pytest.mark.parametrize("least", [0.08, 0.5, 0.95])
def test_boxes_are_distributed_as_torchvisions(least: float) -> None:
    torch.manual_seed(0)
    blank = torch.zeros(3, 50, 50)
    draw = tv.RandomResizedCrop.get_params
    theirs = torch.tensor([draw(blank, [least, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]).double()
    ours = crop_boxes(torch.tensor([50, 50]).expand(4000, 2), least, generator()).double()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= 50).all()
    spread = theirs.std(0) * (2 / 4000) ** 0.5
    assert ((ours.mean(0) - theirs.mean(0)).abs() <= 4 * spread + 1e-9).all()
    assert ((ours.std(0) - theirs.std(0)).abs() <= 0.06 * theirs.std(0) + 1e-9).all()


def test_boxes_keep_the_least_area() -> None:
    boxes = crop_boxes(torch.tensor([64, 64]).expand(2000, 2), 0.5, generator()).double()
    area = boxes[:, 2] * boxes[:, 3] / 64**2
    assert area.min() > 0.5 - 0.02  # sides are whole pixels
    assert area.max() > 0.95


def test_the_generator_alone_decides() -> None:
    view, images = View(16, 20, MEAN, STD, flip=True, crop=0.5), pixels(8, 20)
    torch.manual_seed(1)
    one = view.train(images, generator(3))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(one, view.train(images, generator(3)))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(one, view.train(images, generator(4)))


def test_images_get_crops_of_their_own() -> None:
    same = pixels(1, 20).repeat(8, 1, 1, 1)
    seen = View(16, 20, MEAN, STD, crop=0.5).train(same, generator())
    assert len({image.numpy().tobytes() for image in seen}) > 6


def test_a_view_does_not_touch_the_stored_pixels() -> None:
    images = pixels(4, 16)
    before = images.clone()
    view = View(16, 16, MEAN, STD, flip=True, crop=0.5)
    view.test(images)
    view.train(images, generator())
    assert torch.equal(images, before)


def test_an_empty_batch_stays_empty() -> None:
    view = View(16, 20, MEAN, STD, flip=True, crop=0.5)
    assert view.train(pixels(0, 20), generator()).shape == (0, 3, 16, 16)
    assert view.test(pixels(0, 20)).shape == (0, 3, 16, 16)


@pytest.mark.parametrize("wrong", [{"stored": 4}, {"crop": 0.0}, {"crop": 1.5}])
def test_impossible_views_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong)))):
        View(**({"size": 8, "stored": 8, "mean": MEAN, "std": STD} | wrong))  # type: ignore[arg-type]


def test_pixels_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        View(8, 8, MEAN, STD).test(pixels(1, 9))
    with pytest.raises(ValueError, match="expected uint8"):
        View(8, 8, MEAN, STD).test(pixels(1, 8).float())
