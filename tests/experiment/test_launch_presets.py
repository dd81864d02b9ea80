"""Whole runs in every preset: on folders and on small arrays, with memories, resumed and loaded."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cofima.data import Sample, Source, datasets
from cofima.data.datasets import read
from cofima.data.loading import loader
from cofima.data.loading.pixel_format import PixelFormat, center_square
from cofima.experiment.launch import launch
from cofima.store import model_folder
from cofima.store.model import load_model


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for part, count in (("train", 6), ("test", 2)):
        for label in range(4):
            folder = root / part / f"class {label}"
            folder.mkdir(parents=True)
            for number in range(count):
                random = np.random.RandomState(100 * label + number + (50 if part == "test" else 0))
                values = random.randint(0, 80, (20, 26, 3), np.uint8)
                values[..., label % 3] += np.uint8(40 * (1 + label // 3))
                Image.fromarray(values).save(folder / f"{number}.png")
    return root


def config(tiny, root: Path, preset: str | None, method: str = "seq_ft", **data: object):  # type: ignore[no-untyped-def]
    return tiny.config(
        method,
        dataset=f"folder:{root}",
        data={"preset": preset, **data},
        train={"epochs": 1, "batch_size": 8},
    )


# how images are kept does not depend on who keeps them: one method has all presets, the others one
@pytest.mark.parametrize(
    ("preset", "method"),
    [
        ("slca", "bic"),
        ("pilot", "bic"),
        ("timm", "bic"),
        ("slca", "cofima"),
        ("slca", "der_pp"),
        ("slca", "gdumb"),
    ],
)
def test_a_run_records_its_preset_and_is_loaded_with_it(
    preset: str, method: str, tiny, images: Path, tmp_path: Path
) -> None:
    model = launch(config(tiny, images, preset, method), tmp_path / "run")
    assert model.view.preset == preset
    assert model.view.whole == (0 if preset == "timm" else 21)
    said = json.loads((model_folder.current(tmp_path / "run") / "config.json").read_text())
    assert said["preprocess"]["preset"] == preset
    again = load_model(tmp_path / "run")
    assert again.view == model.view
    with Image.open(images / "test" / "class 0" / "0.png") as image:
        row, square = (
            model.view.pixel_format.encode(image)[None],
            center_square(image, model.view.stored)[None],
        )
    assert torch.equal(again.logits(row), model.logits(row))
    assert model.logits(square).shape == (1, 4)  # a single file needs no more than its center


@pytest.mark.parametrize("method", ["cofima", "bic"])
def test_a_run_that_was_cut_off_ends_alike(
    method: str, tiny, images: Path, tmp_path: Path, stop_at, monkeypatch: pytest.MonkeyPatch, same_bits
) -> None:
    how = config(tiny, images, "slca", method)
    whole = launch(how, tmp_path / "whole")
    with monkeypatch.context(), pytest.raises(stop_at(1, step=2)):
        launch(how, tmp_path / "cut")
    monkeypatch.undo()
    same_bits(launch(how, tmp_path / "cut").weights(), whole.weights())


def test_a_run_on_pixels_from_disk_is_the_same(
    tiny, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_bits
) -> None:
    how = config(tiny, images, "slca", "bic")
    expected = launch(how, tmp_path / "memory")
    monkeypatch.setenv("COFIMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "IN_MEMORY", 0)
    got = launch(how, tmp_path / "disk")
    same_bits(got.weights(), expected.weights())
    same_bits(got.method.state(), expected.method.state())


def test_the_preset_of_a_run_may_not_change(tiny, images: Path, tmp_path: Path) -> None:
    launch(config(tiny, images, "slca"), tmp_path / "run")
    with pytest.raises(Exception, match=r"data.preset: slca before, pilot now"):
        launch(config(tiny, images, "pilot"), tmp_path / "run")


def test_flip_and_crop_are_the_users(tiny, images: Path, tmp_path: Path) -> None:
    view = launch(config(tiny, images, "slca", flip=False, crop=0.4), tmp_path / "run").view
    assert (view.flip, view.crop, view.window, view.preset) == (False, 0.4, False, "slca")


@pytest.mark.parametrize("preset", ["slca", "pilot"])
def test_square_images_in_memory_are_whole_images(preset: str, tiny, tmp_path: Path) -> None:
    how = tiny.config("seq_ft", dataset="blobs", data={"preset": preset}, train={"epochs": 1})
    model = launch(how, tmp_path / "run")
    assert model.view.shape == (18, 18)
    assert not model.view.flip  # a mirrored blob is another class


@pytest.mark.parametrize("preset", ["slca", "pilot", "timm"])
def test_small_arrays_are_enlarged_when_they_are_seen(
    preset: str, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.RandomState(0).randint(0, 256, (40, 8, 8, 3), np.uint8)
    made = [Sample(str(n), n % 4, lambda n=n: pixels[n]) for n in range(40)]  # type: ignore[misc]
    source = Source("blobs", "v", tuple("abcd"), made[:32], made[32:], True, 0.5, {})

    def load(name: str, form: PixelFormat, **_: object) -> object:
        return read(source, form)

    monkeypatch.setattr(datasets, "load", load)
    how = tiny.config("der_pp", dataset="blobs", data={"preset": preset}, train={"epochs": 1})
    model = launch(how, tmp_path / "run")
    assert model.view.shape == (8, 8)
    assert load_model(tmp_path / "run").method.state()["memory.pixels"].shape[1:] == (3, 8, 8)
