"""Fisher information of a model folder, in a file: against the function, and matched by class names."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import cofima
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.data.sources.in_memory import blobs
from cofima.store import model_folder
from cofima.store.model import Model, load_model

FIRST = ((0, 1), (2, 3))


def pictures(folder: Path, model: Model, classes: list[str], each: int = 3) -> None:
    """Write a few images of classes that the model knows, without loss."""
    images = blobs(8, per_class=4, side=16)
    for name in classes:
        label = images.class_names.index(name)
        (folder / name).mkdir(parents=True)
        for place in (images.train.labels == label).nonzero()[:each, 0]:
            pixels, _ = images.train.batch(place[None])
            picture = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
            picture.save(folder / name / f"{int(place):03d}.png")


def batch(folder: Path, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the folder the obvious way."""
    images, labels = [], []
    for path in sorted(folder.glob("*/*.png")):
        images.append(torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1))
        labels.append(model.classes.index(path.parent.name))
    return model.view.test(torch.stack(images)), torch.tensor(labels)


def expected(model: Model, folder: Path, **how: object) -> dict[str, torch.Tensor]:
    """Return the Fisher information by the function, of backbone and predicting head put together anew."""
    flat = model.method.head().flat()
    head = nn.Linear(flat["weight"].shape[1], len(flat["bias"]))
    head.load_state_dict(flat)
    net = nn.Sequential(model.method.net.backbone, head)
    found = cofima.diagonal_fisher(net, [batch(folder, model)], **how)  # type: ignore[arg-type]
    return {
        key.replace("0.", "", 1) if key[0] == "0" else key.replace("1.", "head.", 1): v
        for key, v in found.items()
    }


@pytest.fixture
def known(learn, tmp_path: Path) -> tuple[Path, Model, Path]:
    """Return a folder, its model (with an aligned head), and images of three of its four classes."""
    path = learn("coma", FIRST)
    model = load_model(path)
    pictures(tmp_path / "images", model, model.classes[:3])
    return path, model, tmp_path / "images"


@pytest.mark.parametrize("labels", ["data", "exact", "sampled"])
def test_it_is_that_of_the_model_that_predicts(labels: str, known, tmp_path: Path) -> None:
    path, model, images = known
    done = cofima.fisher(path, images, tmp_path / "f.safetensors", labels=labels)  # type: ignore[arg-type]
    assert (done.images, done.classes) == (9, 3)
    found = load_file(done.path)
    parameters = {key for key, _ in model.method.net.backbone.named_parameters()} | {
        "head.weight",
        "head.bias",
    }
    assert found.keys() == parameters
    torch.testing.assert_close(found, expected(model, images, labels=labels), rtol=1e-4, atol=1e-9)


def test_local_logits_cover_the_folder_s_classes(known, tmp_path: Path) -> None:
    path, model, images = known
    cofima.fisher(path, images, tmp_path / "f.safetensors", logits="local")
    found = load_file(tmp_path / "f.safetensors")
    torch.testing.assert_close(found, expected(model, images, columns=slice(0, 3)), rtol=1e-4, atol=1e-9)
    assert float(found["head.weight"][3].abs().sum()) == 0
    shutil.rmtree(images / model.classes[1])
    with pytest.raises(CofimaError, match=f"between them are {model.classes[1]}"):
        cofima.fisher(path, images, tmp_path / "g.safetensors", logits="local")


def test_the_file_says_how_it_was_made(known, tmp_path: Path) -> None:
    path, model, images = known
    cofima.fisher(path, images, tmp_path / "f.safetensors", max_per_class=2)
    with safe_open(tmp_path / "f.safetensors", "pt") as file:
        said = file.metadata()
    assert said["images"] == "6"
    assert said["estimator"] == "sample"
    assert (said["labels"], said["logits"]) == ("data", "seen")
    assert json.loads(said["classes"]) == model.classes
    assert said["model_sha256"] == model_folder.read(path).record.weights_digest
    assert len(said["data"]) == 64


def test_the_train_part_of_a_split_folder_is_taken(known, tmp_path: Path) -> None:
    path, _, images = known
    (tmp_path / "split").mkdir()
    shutil.copytree(images, tmp_path / "split" / "train")
    shutil.copytree(images, tmp_path / "split" / "test")
    (first,) = list((tmp_path / "split" / "test").glob("*/*.png"))[:1]
    first.write_bytes(b"not read")
    assert cofima.fisher(path, tmp_path / "split", tmp_path / "f.safetensors").images == 9


def test_unknown_classes_and_bad_images_are_listed(known, tmp_path: Path) -> None:
    path, model, images = known
    strange = ["unicorn", model.classes[3].replace("b", "B")]
    for folder in strange:
        shutil.copytree(images / model.classes[0], images / folder)
    with pytest.raises(CofimaError) as said:
        cofima.fisher(path, images, tmp_path / "f.safetensors")
    assert "class 'unicorn' is not known to the model" in str(said.value)
    assert f"did you mean '{model.classes[3]}'?" in str(said.value)
    for folder in strange:
        shutil.rmtree(images / folder)
    bad = images / model.classes[0] / "bad.jpg"
    bad.write_bytes(b"no image")
    with pytest.raises(CofimaError, match=r"bad\.jpg: not an image"):
        cofima.fisher(path, images, tmp_path / "f.safetensors")
    assert not (tmp_path / "f.safetensors").exists()
    with pytest.warns(CofimaWarning, match="left out 1 unreadable"):
        assert cofima.fisher(path, images, tmp_path / "f.safetensors", skip_unreadable=True).images == 9


def test_mistakes_are_told_at_once(known, tmp_path: Path) -> None:
    path, _, images = known
    with pytest.raises(CofimaError) as said:
        cofima.fisher(tmp_path / "no", tmp_path / "none", tmp_path / "f.txt", max_per_class=0)
    for part in (
        "no: no such folder",
        "none: no such folder or file",
        "max_per_class = 0",
        "must end in .safetensors",
    ):
        assert part in str(said.value)
    with pytest.raises(CofimaError, match="would overwrite"):
        cofima.fisher(path, images, path / "f.safetensors", force=True)


def test_models_with_other_parts_are_refused(learn, known, tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match="predicts with prompts"):
        cofima.fisher(learn("l2p", FIRST), known[2], tmp_path / "f.safetensors")


def test_a_merge_refuses_the_fisher_of_another_model(known, learn, tmp_path: Path) -> None:
    path, model, images = known
    other = learn("slca", FIRST)
    files = [tmp_path / "f.safetensors", tmp_path / "g.safetensors"]
    cofima.fisher(path, images, files[0])
    cofima.fisher(other, images, files[1])
    with pytest.raises(CofimaError, match="was measured on another model"):
        cofima.merge([path, other], tmp_path / "out", "fisher", fisher=files[::-1])
    done = cofima.merge([path, other], tmp_path / "out", "fisher", fisher=files)
    assert done.classes == model.classes
    a, b, found = (load_model(p).weights() for p in (path, other, tmp_path / "out"))
    known_fishers = [load_file(file) for file in files]
    torch.testing.assert_close(found, cofima.fisher_average(a, b, *known_fishers, 0.5))
