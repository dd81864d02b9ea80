"""Datasets that other libraries find: torchvision's classes, and the Hugging Face hub."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets as theirs

from cofima.core.errors import CofimaError
from cofima.data import datasets
from cofima.data.datasets import DataOptions, check


def options(root: Path, **more: Any) -> DataOptions:
    return DataOptions(root=root, **more)


def test_a_torchvision_class_by_its_name(make, tmp_path: Path) -> None:
    make("fashion_mnist", "idx", tmp_path)
    source = datasets.find("torchvision:FashionMNIST", options(tmp_path))
    oracle = theirs.FashionMNIST(str(tmp_path), train=False)
    assert source.facts["split_id"] == "torchvision:FashionMNIST:official"
    assert source.class_names == tuple(oracle.classes)
    assert [picture.label for picture in source.test] == oracle.targets.tolist()
    assert np.array_equal(source.test[3].read(), np.asarray(oracle[3][0].convert("RGB")))
    loaded = datasets.load("torchvision:FashionMNIST", 28, options=options(tmp_path))
    assert torch.equal(loaded.test.batch(torch.tensor([3]))[0][0, 0], oracle.data[3])


def test_a_torchvision_class_with_splits(photograph, tmp_path: Path, monkeypatch) -> None:
    class Splits(theirs.VisionDataset):
        classes = ("a", "b")

        def __init__(
            self, root: str, split: str = "train", transform: Any = None, download: bool = False
        ) -> None:
            if split not in ("train", "val"):
                raise ValueError(split)
            super().__init__(root)
            self.split = split

        def __len__(self) -> int:
            return 4 if self.split == "train" else 2

        def __getitem__(self, place: int) -> tuple[Image.Image, int]:
            return Image.new("L", (4, 4), place + (10 if self.split == "val" else 0)), place % 2

    monkeypatch.setattr(theirs, "Splits", Splits, raising=False)
    monkeypatch.setattr(theirs, "__all__", (*theirs.__all__, "Splits"))
    source = datasets.find("torchvision:Splits", options(tmp_path))
    assert (source.variant, source.class_names) == ("train+val", ("a", "b"))
    assert [picture.label for picture in source.test] == [0, 1]
    assert source.test[1].read().tolist() == np.full((4, 4, 3), 11).tolist()


def test_a_torchvision_class_without_parts_is_dealt(photograph, tmp_path: Path) -> None:
    for name, count in (("AnnualCrop", 5), ("Forest", 10)):
        for number in range(count):
            path = tmp_path / "eurosat" / "2750" / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photograph(100 * count + number))
    source = datasets.find("torchvision:EuroSAT", options(tmp_path, split_seed=2))
    assert source.variant == "seed2"
    assert (len(source.train), len(source.test)) == (12, 3)
    assert source.class_names == ("AnnualCrop", "Forest")


def test_what_torchvision_cannot_give_is_said(tmp_path: Path) -> None:
    assert (
        check("torchvision:Flower102")
        == "unknown dataset 'torchvision:Flower102'; did you mean 'Flowers102'?"
    )
    assert check("torchvision:Flowers102") is None
    assert "unknown dataset" in str(check("torchvision:CocoDetection"))  # needs more than a folder
    with pytest.raises(
        CofimaError, match=r"torchvision:CIFAR10 was not found in\n .*Dataset not found"
    ) as caught:
        datasets.find("torchvision:CIFAR10", options(tmp_path))
    assert "torchvision.datasets.CIFAR10(ROOT, download=True)" in str(caught.value)


class StandIn(ModuleType):
    """The few names of the library ``datasets`` that are used, as it documents them."""

    class Image:
        def __init__(self, decode: bool = True) -> None:
            self.decode = decode

    class ClassLabel:
        def __init__(self, names: list[str]) -> None:
            self.names = names

    class Rows:
        def __init__(self, features: dict[str, Any], rows: list[dict[str, Any]]) -> None:
            self.features, self.rows = features, rows

        def cast_column(self, name: str, feature: Any) -> Any:
            assert not feature.decode
            return StandIn.Rows(self.features | {name: feature}, self.rows)

        def __getitem__(self, key: int | str) -> Any:
            return self.rows[key] if isinstance(key, int) else [row[key] for row in self.rows]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the datasets that a stand-in for the library knows."""
    module, known = StandIn("datasets"), {}
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("datasets", None)

    def load_dataset(path: str, name: str | None = None) -> Any:
        if (path, name) not in known:
            raise FileNotFoundError(f"Dataset '{path}' doesn't exist on the Hub")
        return known[path, name]

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return known


def rows(photograph, labels: list[int], first: int, **columns: Any) -> StandIn.Rows:
    features = {"img": StandIn.Image(), "fine_label": StandIn.ClassLabel(["cat", "dog"]), **columns}
    images = [{"bytes": photograph(first + n), "path": None} for n in range(len(labels))]
    return StandIn.Rows(features, [{"img": i, "fine_label": n} for i, n in zip(images, labels, strict=True)])


def test_a_dataset_of_the_hub(library, photograph, tmp_path: Path) -> None:
    coarse = {"coarse_label": StandIn.ClassLabel(["animal"])}
    library["owner/pets", "small"] = {
        "train": rows(photograph, [0, 1, 1], 0, **coarse),
        "validation": rows(photograph, [1, 0], 10, **coarse),
    }
    source = datasets.find("hf:owner/pets@small", options(tmp_path))
    assert source.facts["split_id"] == "hf:owner/pets@small:train+validation"
    assert (source.class_names, source.facts["column"]) == (("cat", "dog"), "fine_label")
    assert [picture.label for picture in source.test] == [1, 0]
    assert source.test[1].read() == photograph(11)
    assert len(datasets.load("hf:owner/pets@small", 8, options=options(tmp_path)).train) == 3


def test_a_part_alone_is_dealt_and_files_are_read(library, photograph, tmp_path: Path) -> None:
    one = rows(photograph, [0] * 5 + [1] * 5, 0)
    (tmp_path / "one.jpg").write_bytes(photograph(99))
    one.rows[0]["img"] = {"bytes": None, "path": str(tmp_path / "one.jpg")}
    (tmp_path / "own").mkdir()
    library[str(tmp_path / "own"), None] = {"train": one}  # a folder of this name goes first
    source = datasets.find("hf:own", options(tmp_path))
    assert (source.variant, len(source.test)) == ("seed0", 2)
    assert photograph(99) in [picture.read() for picture in [*source.train, *source.test]]


def test_what_the_hub_cannot_give_is_said(library, photograph, tmp_path: Path, monkeypatch) -> None:
    good = rows(photograph, [0, 1], 0)
    library["test only", None] = {"test": good}
    library["no image", None] = {"train": StandIn.Rows({"label": StandIn.ClassLabel(["a"])}, [])}
    library["hidden", None] = {"train": good, "test": rows(photograph, [-1, -1], 5)}
    for name, said in (
        ("nothing", "could not be loaded: Dataset 'nothing' doesn't exist"),
        ("test only", "no split 'train', only test"),
        ("no image", "found no images and"),
        ("hidden", "class 'cat': no test images"),
    ):
        with pytest.raises(CofimaError, match=said):
            datasets.find(f"hf:{name}", options(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'cofima[hf]'" in str(datasets.missing("hf:x", DataOptions()))


def test_the_library_itself_reads_a_folder(photograph, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra [hf]")
    for part, count in (("train", 3), ("test", 2)):
        for label, name in enumerate(("cat", "dog")):
            for number in range(count):
                path = tmp_path / "pets" / part / name / f"{part}{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(photograph(1000 * count + 10 * number + label))
    source = datasets.find("hf:pets", options(tmp_path))
    assert source.class_names == ("cat", "dog")
    assert (len(source.train), len(source.test)) == (6, 4)
    stored = {path.read_bytes() for path in (tmp_path / "pets" / "test" / "dog").iterdir()}
    assert {picture.read() for picture in source.test if picture.label == 1} == stored


def test_the_library_itself_reads_parquet(photograph, tmp_path: Path) -> None:
    hf = pytest.importorskip("datasets", reason="needs the extra [hf]")
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["cat", "dog"])})
    for part, count in (("train", 6), ("test", 4)):
        columns = {
            "image": [{"bytes": photograph(100 * count + n), "path": None} for n in range(count)],
            "label": [n % 2 for n in range(count)],
        }
        place = tmp_path / "pets" / "data" / f"{part}-00000-of-00001.parquet"
        place.parent.mkdir(parents=True, exist_ok=True)
        hf.Dataset.from_dict(columns, features=features).to_parquet(place)
    source = datasets.find("hf:pets", options(tmp_path))
    assert source.class_names == ("cat", "dog")
    assert [picture.label for picture in source.train] == [0, 1] * 3
    assert [picture.read() for picture in source.test] == [photograph(400 + n) for n in range(4)]
