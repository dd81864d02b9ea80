"""Presets against the torchvision transforms that they reproduce, on the original images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as tv

from cofima.data import transforms
from cofima.data.options import Preset
from cofima.data.transforms import View, crop_boxes, random_windows, scaled_boxes

BICUBIC = tv.InterpolationMode.BICUBIC
IMAGENET = tv.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR = tv.Normalize((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
TEST = [tv.Resize(256, BICUBIC), tv.CenterCrop(224), tv.ToTensor()]
HALF = (0.5, 0.5, 0.5)
WANTS = View(224, 248, HALF, HALF, flip=True, crop=0.5)
SMALL = replace(WANTS, size=28)  # 32 px for tests, 38 px squeezed
PLAIN = tv.Normalize((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.RandomState(seed).randint(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BILINEAR)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gray_levels(view: View, images: Tensor) -> Tensor:
    """Undo the normalization."""
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in (view.mean, view.std))
    return 255 * (images * std + mean)


@pytest.mark.parametrize(
    ("preset", "dataset", "normalize"),
    [
        ("slca", "imagenet_r", IMAGENET),
        ("slca", "cub200", IMAGENET),
        ("slca", "cars196", IMAGENET),
        ("slca", "vtab", IMAGENET),
        ("pilot", "cub200", PLAIN),
    ],
)
def test_photographs_are_tested_exactly_as_published(
    preset: Preset, dataset: str, normalize: tv.Normalize
) -> None:
    view = transforms.preset_view(preset, dataset, WANTS)
    for shape in [(500, 375), (240, 320)]:
        image = photo(*shape)
        expected = tv.Compose([*TEST, normalize])(image)
        torch.testing.assert_close(
            view.test(view.pixel_format.encode(image)[None])[0], expected, rtol=1e-6, atol=2e-6
        )


@pytest.mark.parametrize(("preset", "normalize"), [("slca", CIFAR), ("pilot", PLAIN)])
def test_cifar_is_tested_as_published_to_within_rounding(preset: Preset, normalize: tv.Normalize) -> None:
    view = replace(transforms.preset_view(preset, "cifar100", WANTS), shape=(32, 32))
    pictures = [photo(32, 32, seed) for seed in range(4)]
    stored = torch.stack([tv.PILToTensor()(picture) for picture in pictures])
    expected = torch.stack([tv.Compose([*TEST, normalize])(picture) for picture in pictures])
    difference = (gray_levels(view, view.test(stored)) - gray_levels(view, expected)).abs()
    assert difference.max() < 1.01
    assert (difference > 0.01).float().mean() < 0.01


def test_timm_takes_everything_from_the_backbone() -> None:
    view = transforms.preset_view("timm", "cub200", replace(WANTS, interpolation="bilinear"))
    assert view == View(224, 248, HALF, HALF, flip=True, crop=0.5, interpolation="bilinear")
    assert view.pixel_format.shape == (3, 248, 248)


def test_the_paper_decides_the_default() -> None:
    assert transforms.PAPER_DATASETS == ("cifar100", "imagenet_r", "cub200", "cars196", "vtab")
    assert [
        transforms.choose_preset(None, name) for name in (*transforms.PAPER_DATASETS, "digits", "folder:x")
    ] == ["slca"] * 5 + ["timm"] * 2
    assert transforms.choose_preset("timm", "cub200") == "timm"
    assert transforms.choose_preset("pilot", "digits") == "pilot"


def test_what_differs_between_the_datasets_of_the_paper() -> None:
    made = {name: transforms.preset_view("slca", name, WANTS) for name in transforms.PAPER_DATASETS}
    assert {name: (v.window, v.crop, v.interpolation) for name, v in made.items()} == {
        "cifar100": (False, 0.08, "bicubic"),
        "imagenet_r": (False, 0.08, "bicubic"),
        "cub200": (True, 1.0, "bicubic"),
        "cars196": (True, 1.0, "bicubic"),
        "vtab": (True, 1.0, "bicubic"),
    }
    assert [v.brightness for v in made.values()] == [63 / 255, 0, 0, 0, 0]
    assert all((v.size, v.stored, v.whole, v.flip) == (224, 256, 300, True) for v in made.values())
    pilot = transforms.preset_view("pilot", "cifar100", WANTS)
    assert (pilot.crop, pilot.interpolation, pilot.brightness, pilot.mean) == (0.05, "bilinear", 0, (0, 0, 0))


def test_images_that_may_not_be_mirrored_are_not() -> None:
    for preset in ("slca", "pilot", "timm"):
        assert not transforms.preset_view(preset, "digits", replace(WANTS, flip=False)).flip


def test_the_user_has_the_last_word() -> None:
    view = transforms.preset_view("slca", "cub200", WANTS)
    changed = transforms.override(view, False, 0.3)
    assert (changed.flip, changed.crop, changed.window) == (False, 0.3, False)
    assert transforms.override(view, None, None) == view


def test_every_window_is_a_crop_of_the_squeezed_image_and_all_places_come() -> None:
    view = replace(
        transforms.preset_view("slca", "cub200", SMALL), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), flip=False
    )
    image = photo(60, 45)
    squeezed = tv.Compose([tv.Resize((38, 38), BICUBIC), tv.ToTensor()])(image)
    windows = {
        squeezed[:, top : top + 28, left : left + 28].numpy().tobytes(): (top, left)
        for top in range(11)
        for left in range(11)
    }
    seen = view.train(view.pixel_format.encode(image).repeat(1500, 1), generator())
    places = [windows[one.contiguous().numpy().tobytes()] for one in seen]
    assert len(set(places)) == 121
    counts = np.bincount([top for top, _ in places], minlength=11)
    assert counts.min() > 136 - 5 * 136**0.5  # as likely as any other


def test_windows_of_small_images_are_cut_from_the_enlarged_whole() -> None:
    view = replace(transforms.preset_view("slca", "fashion", SMALL), flip=False, shape=(16, 16))
    image = photo(16, 16)
    big = tv.Compose([tv.Resize((38, 38), BICUBIC), tv.PILToTensor()])(image).float()
    seen = gray_levels(view, view.train(tv.PILToTensor()(image).repeat(5, 1, 1, 1), generator()))
    for one in seen:
        nearest = min(
            float((one - big[:, t : t + 28, left : left + 28]).abs().max())
            for t in range(11)
            for left in range(11)
        )
        assert nearest < 1.01


@pytest.mark.parametrize("shape", [(60, 100), (100, 60), (50, 50), (30, 300), (300, 30), (7, 5)])
@pytest.mark.parametrize("least", [0.08, 0.95])
def test_boxes_within_any_shape_are_distributed_as_torchvisions(shape: tuple[int, int], least: float) -> None:
    torch.manual_seed(0)
    blank = torch.zeros(3, *shape)
    count = 600
    draw = tv.RandomResizedCrop.get_params
    theirs = torch.tensor([draw(blank, [least, 1.0], [3 / 4, 4 / 3]) for _ in range(count)]).double()
    ours = crop_boxes(torch.tensor(shape).expand(count, 2), least, generator()).double()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= torch.tensor(shape)).all()
    spread = theirs.std(0) * (2 / count) ** 0.5
    assert ((ours.mean(0) - theirs.mean(0)).abs() <= 4 * spread + 1e-9).all()
    assert ((ours.std(0) - theirs.std(0)).abs() <= 0.2 * theirs.std(0) + 0.02).all()


@pytest.mark.parametrize("shape", [(30, 300), (300, 30)])
def test_where_no_shape_fits_the_largest_center_is_taken(shape: tuple[int, int]) -> None:
    ours = crop_boxes(torch.tensor(shape).expand(50, 2), 0.95, generator())
    blank = torch.zeros(3, *shape)
    assert {tuple(box) for box in ours.tolist()} == {
        tuple(tv.RandomResizedCrop.get_params(blank, [0.95, 1.0], [3 / 4, 4 / 3]))
    }


def test_boxes_keep_their_place_when_an_image_is_squeezed() -> None:
    shapes = torch.tensor([[375, 500], [4000, 300], [3, 900]]).repeat(100, 1)
    boxes = crop_boxes(shapes, 0.08, generator())
    scaled = scaled_boxes(boxes, shapes, 300)
    start, end = boxes[:, :2] / shapes, (boxes[:, :2] + boxes[:, 2:]) / shapes
    assert (scaled[:, 2:] >= 1).all()
    assert (scaled[:, :2] + scaled[:, 2:] <= 300).all()
    assert (scaled[:, :2] / 300 - start).abs().max() <= 0.5 / 300 + 1e-9
    assert ((scaled[:, :2] + scaled[:, 2:]) / 300 - end).abs().max() <= 0.5 / 300 + 1e-9


def test_random_crops_of_what_is_kept_are_close_to_those_of_the_original() -> None:
    view = replace(transforms.preset_view("slca", "imagenet_r", WANTS), flip=False)
    image = photo(25, 19).resize((500, 375), Image.Resampling.BICUBIC)  # as smooth as photographs are
    seen = gray_levels(view, view.train(view.pixel_format.encode(image).repeat(6, 1), generator(5)))
    boxes = crop_boxes(torch.tensor([375, 500]).expand(6, 2), 0.08, generator(5))
    for one, (top, left, height, width) in zip(seen, boxes.tolist(), strict=True):
        expected = tv.functional.resized_crop(image, top, left, height, width, [224, 224], BICUBIC)
        error = (one - tv.PILToTensor()(expected)).abs().mean()
        shifted = (one.roll(4, 2) - tv.PILToTensor()(expected)).abs().mean()
        assert error < 1
        assert error < shifted / 2  # nothing is displaced


def test_brightness_is_that_of_torchvision() -> None:
    view = View(8, 8, (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255), brightness=63 / 255)
    images = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8, generator=generator(1))
    seen = view.train(images, generator(2))
    factors = 1 + 63 / 255 * (2 * torch.rand(64, generator=generator(2)) - 1)
    for image, factor, one in zip(images, factors.tolist(), seen, strict=True):
        expected = tv.functional.adjust_brightness(tv.ToPILImage()(image), factor)
        assert torch.equal(one.round().to(torch.uint8), tv.PILToTensor()(expected))
    assert factors.min() < 1 - 0.2
    assert factors.max() > 1 + 0.2


def test_the_generator_alone_decides_in_every_preset() -> None:
    rows = torch.stack(
        [
            transforms.preset_view("slca", "cub200", SMALL).pixel_format.encode(photo(50, 40, i))
            for i in range(4)
        ]
    )
    for preset, dataset in (("slca", "cub200"), ("slca", "imagenet_r"), ("pilot", "cub200")):
        view = transforms.preset_view(preset, dataset, SMALL)
        before = rows.clone()
        one = view.train(rows, generator(3))
        assert torch.equal(one, view.train(rows, generator(3)))
        assert not torch.equal(one, view.train(rows, generator(4)))
        assert torch.equal(rows, before)
        assert one.shape == (4, 3, 28, 28)
        assert view.train(rows[:0], generator()).shape == view.test(rows[:0]).shape == (0, 3, 28, 28)


def test_squares_are_tested_like_rows() -> None:
    """A model that learned from rows predicts from squares, as they are made of a single file."""
    from cofima.data.loading.pixel_format import center_square

    view, image = transforms.preset_view("slca", "cub200", SMALL), photo(50, 40)
    rows, squares = (
        view.test(view.pixel_format.encode(image)[None]),
        view.test(center_square(image, view.stored)[None]),
    )
    assert (gray_levels(view, rows) - gray_levels(view, squares)).abs().max() < 2.01
    with pytest.raises(ValueError, match="expected uint8"):
        view.train(center_square(image, view.stored)[None], generator())


def test_windows_are_cut_within_the_image() -> None:
    images = torch.arange(9).view(1, 1, 3, 3).expand(40, 3, 3, 3).to(torch.uint8)
    corners = {int(one[0, 0, 0]) for one in random_windows(images, 2, generator())}
    assert corners == {0, 1, 3, 4}


@pytest.mark.parametrize("wrong", [{"window": True}, {"whole": 5, "window": True}])
def test_impossible_views_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="whole"):
        View(**({"size": 8, "stored": 8, "mean": HALF, "std": HALF} | wrong))  # type: ignore[arg-type]
