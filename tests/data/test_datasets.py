"""Datasets by name: found, checked before any work, and the same each time."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from sklearn.datasets import load_digits

from cofima.core.errors import CofimaError
from cofima.data import sources
from cofima.data.datasets import DataOptions, check, describe, load, names
from cofima.data.sources.in_memory import blobs
from cofima.data.stream import Dataset


def nearest_mean_accuracy(dataset: Dataset) -> float:
    train, train_labels = dataset.train.batch(torch.arange(len(dataset.train)))
    test, test_labels = dataset.test.batch(torch.arange(len(dataset.test)))
    train, test = train.float().flatten(1), test.float().flatten(1)
    means = torch.stack([train[train_labels == c].mean(0) for c in range(len(dataset.class_names))])
    return float((torch.cdist(test, means).argmin(1) == test_labels).float().mean())


def test_digits_are_the_scans_enlarged() -> None:
    dataset = load("digits", 8, options=DataOptions())
    scans = load_digits()
    for images in (dataset.train, dataset.test):
        pixels, labels = images.batch(torch.arange(len(images)))
        rows = images.rows.numpy()
        assert np.array_equal(labels, scans.target[rows])
        assert np.array_equal(pixels[:, 0], np.rint(scans.images[rows] * 255 / 16))
        assert (pixels == pixels[:, :1]).all()


def test_digits_are_enlarged_as_pillow_does() -> None:
    dataset = load("digits", 64, options=DataOptions())
    small = load("digits", 8, options=DataOptions()).train.pixels[5, 0]
    expected = np.asarray(Image.fromarray(small.numpy()).resize((64, 64), Image.Resampling.BICUBIC))
    assert np.abs(dataset.train.pixels[5, 0].numpy().astype(int) - expected).max() <= 1


def test_digits_have_all_images_and_a_share_of_each_class() -> None:
    start = time.perf_counter()
    dataset = load("digits", 64, options=DataOptions())
    assert time.perf_counter() - start < 5  # 0.1 s on a quiet machine
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    assert sorted(dataset.train.rows.tolist() + dataset.test.rows.tolist()) == list(range(1797))
    assert all(count in range(34, 38) for count in dataset.test.counts().values())
    assert dataset.class_names == tuple("0123456789")
    assert (dataset.flip, dataset.crop) == (False, 1.0)


def test_digits_split_follows_its_seed() -> None:
    one, same, other = (load("digits", 8, options=DataOptions(split_seed=s)) for s in (0, 0, 1))
    assert torch.equal(one.test.rows, same.test.rows)
    assert not torch.equal(one.test.rows, other.test.rows)
    assert one.facts == same.facts


@pytest.mark.parametrize("classes", [2, 6, 24])
def test_blobs_can_be_told_apart(classes: int) -> None:
    assert nearest_mean_accuracy(blobs(classes)) == 1.0


def test_blobs_are_deterministic_and_disjoint() -> None:
    one, same, other = blobs(), blobs(), blobs(seed=1)
    assert one.facts["fingerprint"] == same.facts["fingerprint"] != other.facts["fingerprint"]
    assert set(one.train.rows.tolist()).isdisjoint(one.test.rows.tolist())
    assert one.train.counts() == dict.fromkeys(range(6), 20)
    assert one.test.counts() == dict.fromkeys(range(6), 10)
    assert len({image.numpy().tobytes() for image in one.train.pixels}) == len(one.train.pixels)


def test_blobs_take_any_size() -> None:
    dataset = blobs(classes=3, per_class=1, side=8)
    assert dataset.train.pixels.shape == (3 * 2, 3, 8, 8)
    assert load("blobs", 32, options=DataOptions()).train.pixels.shape[2:] == (32, 32)


def test_every_name_has_a_description() -> None:
    own = ["blobs", "digits", "folder:PATH", "hf:NAME", "torchvision:CLASS"]
    assert names() == sorted([*own, *sources.names()])
    assert all(describe(name) for name in names())
    assert describe("folder:some/where") == describe("folder:PATH")
    with pytest.raises(CofimaError, match="did you mean 'digits'"):
        describe("digit")


def test_names_are_checked_before_any_work(tmp_path: Path) -> None:
    assert check("digits") is None
    assert check("blobs") is None
    assert check("digit") == "unknown dataset 'digit'; did you mean 'digits'?"
    assert "needs a path" in str(check("folder"))
    assert "needs a path" in str(check("folder:"))
    assert check("hf") == "dataset 'hf' needs a path or a name: 'hf:NAME'"
    assert "needs a name" in str(check("hf: "))
    assert check("cub200") is None  # whether it is here is another question
    assert check("cub_200") == "unknown dataset 'cub_200'; did you mean 'cub200'?"
    assert check(f"folder:{tmp_path}") is None
    (tmp_path / "flowers").mkdir()
    (tmp_path / "list.txt").touch()
    assert str(check(f"folder:{tmp_path}/flower")).endswith("/flower; did you mean 'flowers'?")
    assert "is not a folder" in str(check(f"folder:{tmp_path}/list.txt"))
    assert str(check(str(tmp_path))).endswith(f"did you mean 'folder:{tmp_path}'?")
    assert check("folder:flowers", root=tmp_path) is None
    with pytest.raises(CofimaError, match="unknown dataset 'digit'"):
        load("digit", 8, options=DataOptions())


def test_options_override_what_the_dataset_says() -> None:
    dataset = load("digits", 8, options=DataOptions(flip=True, crop=0.7))
    assert (dataset.flip, dataset.crop) == (True, 0.7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"test_fraction": 0},
        {"test_fraction": 1},
        {"max_train_per_class": 0},
        {"crop": 0},
        {"crop": 1.1},
        {"skipbad": True},
    ],
)
def test_senseless_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        DataOptions.model_validate(wrong)


@pytest.mark.parametrize("name", ["digits", "blobs"])
def test_facts_can_be_written_down(name: str) -> None:
    dataset = load(name, 8, options=DataOptions())
    facts = json.loads(json.dumps(dataset.facts))
    assert (facts["train"], facts["test"]) == (len(dataset.train), len(dataset.test))
    assert len(facts["fingerprint"]) == 64


def test_relative_folders_are_found_below_cofima_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared" / "birds").mkdir(parents=True)
    (tmp_path / "here" / "cats").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert "no folder birds" in (check("folder:birds") or "")
    monkeypatch.setenv("COFIMA_DATA", str(tmp_path / "shared"))
    assert check("folder:birds") is None
    assert check("folder:cats") is None  # not there, but here
    assert check("folder:birds", tmp_path / "here") is not None  # a root that is given rules
