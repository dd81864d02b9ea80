"""Exact and near duplicates of photographs are found, and nothing else."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cofima.core.errors import CofimaError, CofimaWarning
from cofima.data.duplicates import (
    Looks,
    duplicates,
    refuse_model_among_photos,
    thumbnail,
    thumbnails,
    warn_of_copies,
)
from cofima.data.loading.pixel_format import PixelFormat
from cofima.data.sources.listing import find_images


def photo(seed: int, side: int = 96) -> Image.Image:
    """Smooth shapes and noise."""
    chance = np.random.default_rng(seed)
    coarse = Image.fromarray(chance.integers(0, 255, (5, 5, 3), dtype=np.uint8)).resize((side, side))
    noisy = np.asarray(coarse) + chance.normal(0, 5, (side, side, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def saved_again(image: Image.Image, quality: int, side: int) -> Image.Image:
    content = io.BytesIO()
    image.resize((side, side)).save(content, "JPEG", quality=quality)
    return Image.open(content).convert("RGB")


def looks(images: list[Image.Image], names: str) -> Looks:
    small = torch.stack([thumbnail(image) for image in images])
    return Looks([f"{names}{n}" for n in range(len(images))], [str(hash(i.tobytes())) for i in images], small)


def test_saved_again_or_resized_it_is_found_and_others_are_not() -> None:
    learned = [photo(seed) for seed in range(40)]
    tested = [
        learned[3],
        saved_again(learned[7], 40, 96),
        saved_again(learned[11], 80, 61),
        learned[13].resize((learned[13].width - 6, learned[13].height - 3)),
        photo(100),
        photo(101),
    ]
    found = duplicates(looks(tested, "test"), looks(learned, "train"))
    assert [str(one) for one in found] == [
        "test0 is train3",
        "test1 is nearly train7",
        "test2 is nearly train11",
        "test3 is nearly train13",
    ]


def test_nothing_is_found_where_there_is_nothing() -> None:
    none = Looks([], [], torch.empty(0, 3, 16, 16, dtype=torch.uint8))
    some = looks([photo(1)], "a")
    assert duplicates(none, some) == duplicates(some, none) == []


def test_thumbnails_of_stored_pixels_are_those_of_images() -> None:
    image = photo(5, 64)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    assert (thumbnails(pixels)[0].int() - thumbnail(image).int()).abs().max() <= 1


@pytest.mark.parametrize("form", [PixelFormat(32), PixelFormat(40, 32, 36)])
def test_held_out_copies_are_listed_by_name(tmp_path: Path, form: PixelFormat) -> None:
    for number in range(4):
        for part in ("train", "test"):
            path = tmp_path / part / "cat" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(number + (10 if part == "test" else 0)).save(path)
    saved_again(photo(2), 60, 90).save(tmp_path / "test" / "cat" / "9.png")
    read = find_images(tmp_path).read(form)
    said = r"1 held-out photograph .*test/cat/9.png is nearly train/cat/2.png"
    for out in (read.held_out(0.2, 0) | read.tested, torch.ones(len(read.files)).bool()):
        with pytest.warns(CofimaWarning, match=said):  # also where its original is held out of fine-tuning
            warn_of_copies(read, form, out)
    (tmp_path / "test" / "cat" / "9.png").unlink()
    read = find_images(tmp_path).read(form)
    warn_of_copies(read, form, read.held_out(0.2, 0) | read.tested)  # a warning would be an error


def test_a_photograph_of_two_classes_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(["cat", "cat", "dog", "dog"]):
        (tmp_path / name).mkdir(exist_ok=True)
        photo(number).save(tmp_path / name / f"{number}.png")
    photo(1).save(tmp_path / "dog" / "9.png")
    photo(2).save(tmp_path / "dog" / "8.png")  # the same class: harmless
    read = find_images(tmp_path).read(PixelFormat(32))
    none = torch.zeros(len(read.files)).bool()
    with pytest.warns(CofimaWarning, match=r"in two classes, .*: dog/9.png is cat/1.png$"):
        warn_of_copies(read, PixelFormat(32), none)


def test_a_model_is_not_written_among_its_photographs(tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for folder in ("photos", "photos/model", "link", "link/a/b", "photos/../photos"):
        with pytest.raises(CofimaError, match="the model would lie among the photographs"):
            refuse_model_among_photos(tmp_path / "photos", tmp_path / folder)
    for folder in ("model", "photos2", "."):
        refuse_model_among_photos(tmp_path / "photos", tmp_path / folder)
