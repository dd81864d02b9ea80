"""A source becomes a dataset: labels, faults, duplicates, and images that stay small."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cofima.core.errors import CofimaError, CofimaWarning
from cofima.data import Sample, Source, transforms
from cofima.data.datasets import read
from cofima.data.loading.decoder import decode_file
from cofima.data.loading.pixel_format import PixelFormat
from cofima.data.stream import split
from cofima.data.transforms import View

FORM = PixelFormat(side=16, size=14, whole=19)


def picture(path: Path, label: int, seed: int) -> Sample:
    values = np.random.RandomState(seed).randint(0, 256, (20, 25 + seed % 5, 3), np.uint8)
    Image.fromarray(values).save(path)
    return Sample(path.name, label, path.read_bytes)


def source_of(folder: Path, train: int = 6, test: int = 4) -> Source:
    made = [picture(folder / f"{n}.png", n % 2, n) for n in range(train + test)]
    return Source("some", "official", ("a", "b"), made[:train], made[train:], True, 0.5, {"split_id": "x"})


def test_pixels_labels_and_facts(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    dataset = read(source, FORM)
    for part, samples in ((dataset.train, source.train), (dataset.test, source.test)):
        pixels, labels = part.batch(torch.arange(len(part)))
        images = [decode_file(tmp_path / one.name) for one in samples]
        expected = torch.stack([FORM.decode_test(FORM.encode(image)[None])[0] for image in images])
        assert torch.equal(FORM.decode_test(pixels), expected)
        assert labels.tolist() == [one.label for one in samples]
    assert dataset.train.pixels.shape[1] > dataset.test.pixels.shape[1]  # tests need no training picture
    assert (dataset.flip, dataset.crop, dataset.class_names) == (True, 0.5, ("a", "b"))
    facts = dataset.facts
    assert {k: facts[k] for k in ("split_id", "train", "test")} == {"split_id": "x", "train": 6, "test": 4}
    assert facts["train_test_overlap"] == 0


def test_the_fingerprint_follows_the_images(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    first = read(source, FORM).facts["fingerprint"]
    assert read(source, FORM).facts["fingerprint"] == first
    picture(tmp_path / "2.png", 0, 99)
    assert read(source, FORM).facts["fingerprint"] != first


def test_the_whole_stream_may_be_held_out(tmp_path: Path) -> None:
    """Training images are tested on, and seen as test images are."""
    view = transforms.preset_view("slca", "cub200", View(14, 15, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    assert view.pixel_format == PixelFormat(16, 14, 19)
    dataset = read(source_of(tmp_path), view.pixel_format)
    task = split(dataset, 2, 2, None).held_out(0.4, 0)[0]
    assert view.test(task.test.batch(torch.arange(len(task.test)))[0]).shape == (len(task.test), 3, 14, 14)
    assert view.test(dataset.test.batch(torch.arange(4))[0]).shape == (4, 3, 14, 14)


def test_every_unreadable_image_is_named_at_once(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    for name in ("1.png", "7.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        CofimaError, match=r"dataset some has 2 problems:\n  1.png: empty file\n  7.png: empty"
    ):
        read(source, FORM)
    with pytest.warns(CofimaWarning, match=r"some: left out 2 unreadable images"):
        dataset = read(source, FORM, skip_unreadable=True)
    assert (len(dataset.train), len(dataset.test)) == (5, 3)
    assert dataset.train.labels.tolist() == [0, 0, 1, 0, 1]
    assert dataset.facts["skipped"] == {"images": 2, "classes": 0, "first": ["1.png", "7.png"]}


def test_a_class_without_readable_images_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, train=2)
    (tmp_path / "1.png").write_bytes(b"")
    with pytest.raises(CofimaError, match="class 'b': no readable training images"):
        read(source, FORM, skip_unreadable=True)


def test_copies_of_training_images_are_counted(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    (tmp_path / "8.png").write_bytes((tmp_path / "0.png").read_bytes())
    with pytest.warns(CofimaWarning, match=r"some: 1 test image also in the training part"):
        assert read(source, FORM).facts["train_test_overlap"] == 1


def test_small_arrays_stay_small_in_both_parts() -> None:
    pixels = np.random.RandomState(0).randint(0, 256, (6, 8, 8, 3), np.uint8)
    made = [Sample(str(n), n % 2, lambda n=n: pixels[n]) for n in range(6)]  # type: ignore[misc]
    dataset = read(Source("s", "v", ("a", "b"), made[:4], made[4:], False, 1.0, {}), FORM)
    assert dataset.train.pixels.shape == (4, 3, 8, 8)
    assert dataset.test.pixels.shape == (2, 3, 8, 8)
    assert np.array_equal(dataset.test.batch(torch.tensor([1]))[0][0].permute(1, 2, 0).numpy(), pixels[5])
