"""Folders of tiny photographs, and settings with which a tiny network learns them in a moment."""

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

import cofima
from cofima.cli.main import main
from cofima.data.sources.in_memory import blobs

IMAGES = blobs(8, per_class=40, side=16).train
SETTINGS = (
    "backbone=vit_test",
    "train.lr=0.05",
    "train.backbone_lr_scale=0.2",
    "train.epochs=6",
    "data.flip=false",
    "data.crop=1",
    "device=cpu",
)
ALIGN = ("options.align.epochs=40", "options.align.samples_per_class=32", "options.align.temperature=0.3")


def write_photos(folder: Path, classes: Sequence[int], per_class: int = 10, first: int = 0) -> Path:
    """Write images of blobs as PNG files, class ``n`` into the folder ``class n``."""
    for label in classes:
        where = folder / f"class {label}"
        where.mkdir(parents=True)
        places = (IMAGES.labels == label).nonzero().flatten()[first : first + per_class]
        for place in places:
            pixels, _ = IMAGES.batch(place[None])
            Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(where / f"{int(place):03d}.png")
    return folder


@pytest.fixture(scope="session")
def photos() -> Callable[..., Path]:
    """Return the function that writes photographs."""
    return write_photos


@pytest.fixture(scope="session")
def settings(pretrained: Path) -> tuple[str, ...]:
    """Return settings for a tiny network that knows other blobs."""
    return (*SETTINGS, *ALIGN, f"model.checkpoint={pretrained}")


@pytest.fixture(scope="session")
def three(shared: Callable[..., Path], settings: tuple[str, ...]) -> Path:
    """Return a model folder that has learned three classes, with two images of each kept."""

    def learn(folder: Path) -> None:
        write_photos(folder / "photos", (0, 1, 2))
        cofima.learn(folder / "photos", folder / "model", settings=settings, keep_images=2)

    return shared("three", learn) / "model"


@pytest.fixture
def model(three: Path, tmp_path: Path) -> Path:
    """Return a copy of that model folder, to change."""
    import shutil

    return Path(shutil.copytree(three, tmp_path / "model"))


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command ``cofima`` in this process."""

    def call(*words: str | Path, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cofima", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    return call
