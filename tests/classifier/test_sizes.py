"""Sizes of model folders on the default backbone, as an engineer meets them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cofima
from cofima.classifier import stages
from cofima.classifier.learn import FOR_PHOTOGRAPHS
from cofima.classifier.measure import KEPT_FEATURES
from cofima.models import efficientnet_lite
from cofima.store import model_folder
from cofima.store.generation import Generation
from cofima.store.record import BACKBONE

MB = 1_000_000
PIXELS = 32  # no size depends on it


def photos(folder: Path, classes: range, each: int = 45) -> Path:
    """Write noise: sizes do not depend on what is learned."""
    for label in classes:
        (folder / f"class {label}").mkdir(parents=True)
        for number in range(each):
            pixels = np.random.default_rng([label, number]).integers(0, 256, (PIXELS, PIXELS, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"class {label}" / f"{number}.png")
    return folder


def sizes(generation: Generation) -> tuple[float, float]:
    """Return the megabytes of a generation's own files, and of its backbone."""
    backbone = generation.place(BACKBONE).stat().st_size
    return (generation.size - backbone) / MB, backbone / MB


def files(folder: Path) -> int:
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.suffix in (".safetensors", ".json", ".jsonl")
    )


@pytest.mark.slow
@pytest.mark.skipif(not efficientnet_lite.installed(FOR_PHOTOGRAPHS), reason="needs cofima[lite]")
@pytest.mark.parametrize(
    ("method", "trained", "most", "with_backbone"),
    [
        ("cofima", False, 16, False),
        ("slda", False, 16, False),
        ("prototype", False, 16, True),
        ("cofima", True, 32, True),
        ("ranpac", False, 40, True),
    ],
)
def test_a_generation_of_lite0_with_15_classes(
    method: str,
    trained: bool,
    most: float,
    with_backbone: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages.Gain, "counts", True)  # noise teaches nothing that would be taken
    model = tmp_path / "model"
    made = cofima.learn(
        photos(tmp_path / "photos", range(15)),
        model,
        method=method,
        fast=not trained,
        epochs=1,
        seed=0,
        settings=[f"model.img_size={PIXELS}", "device=cpu", "val_fraction=0.45"],
    )
    assert len(made.model.kept) == 15 * KEPT_FEATURES
    generation = model_folder.read(model)
    own, backbone = sizes(generation)
    print(f"{method}, {'trained' if trained else 'frozen'}: {own:.2f} MB + backbone {backbone:.2f} MB")
    assert own + (backbone if with_backbone else 0) < most
    assert files(model) == generation.size
    if not trained:
        made.extend(photos(tmp_path / "more", range(15, 16), each=5), fast=True, folder=model)
        again = model_folder.read(model)
        assert len(list(model.glob("backbone-*"))) == 1
        assert files(model) == generation.size + again.size - again.place(BACKBONE).stat().st_size
