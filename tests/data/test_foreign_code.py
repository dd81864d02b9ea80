"""Readers of third-party libraries never unpickle objects or start programs, whatever the file."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets as theirs

from cofima.core.errors import CofimaError
from cofima.data import datasets
from cofima.data.datasets import DataOptions, check
from cofima.data.loading.decoder import BadImageError
from cofima.data.sources.foreign_code import restrained


class Malice:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_plain_values_and_arrays_are_unpickled_and_nothing_else(tmp_path: Path) -> None:
    plain = {"keys": [b"a", "b", 1.5, None], "data": np.arange(6, dtype=np.uint8).reshape(2, 3)}
    with restrained():
        assert np.array_equal(pickle.loads(pickle.dumps(plain))["data"], plain["data"])
        with pytest.raises(BadImageError, match=r"it unpickles pathlib.*which could run any code"):
            pickle.loads(pickle.dumps(Malice(tmp_path / "ran")))
        torch.save(Malice(tmp_path / "ran"), tmp_path / "a.pt")
        with pytest.raises(BadImageError, match="it unpickles"):
            torch.load(tmp_path / "a.pt", weights_only=False)
        np.save(tmp_path / "a.npy", np.array([Malice(tmp_path / "ran")], dtype=object))
        with pytest.raises(BadImageError, match="it unpickles"):
            np.load(tmp_path / "a.npy", allow_pickle=True)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Malice(tmp_path / "ran")))  # elsewhere, the program is the user's own
    assert (tmp_path / "ran").exists()


def test_no_program_is_started() -> None:
    with restrained():
        for start in (lambda: subprocess.run([sys.executable, "-V"]), lambda: os.system("true")):
            with pytest.raises(BadImageError, match="another program"):
                start()
    assert subprocess.run(["true"]).returncode == 0


def test_torchvision_s_lsun_is_refused_and_cifar_is_not(tmp_path: Path) -> None:
    problem = "dataset 'torchvision:LSUN' is not read: it unpickles a file of its folder"
    assert problem in str(check("torchvision:LSUN"))
    with pytest.raises(CofimaError, match=problem):
        datasets.find("torchvision:LSUN", DataOptions(root=tmp_path))
    assert check("torchvision:CIFAR10") is None  # it compares its pickles with published hashes first


def test_a_class_that_unpickles_is_stopped_where_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keeps(theirs.VisionDataset):
        classes = ("a", "b")

        def __init__(self, root: str, train: bool = True) -> None:
            super().__init__(root)
            with (Path(root) / "cache").open("rb") as file:
                self.targets = pickle.load(file)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, place: int) -> tuple[Image.Image, int]:
            return Image.open(Path(self.root) / "a.jpg"), place % 2

        _check_integrity = True

    monkeypatch.setattr(theirs, "Keeps", Keeps, raising=False)
    monkeypatch.setattr(theirs, "__all__", (*theirs.__all__, "Keeps"))
    (tmp_path / "cache").write_bytes(pickle.dumps(Malice(tmp_path / "ran")))
    with pytest.raises(CofimaError, match=r"torchvision:Keeps in .* is not read: it unpickles pathlib"):
        datasets.find("torchvision:Keeps", DataOptions(root=tmp_path))
    assert not (tmp_path / "ran").exists()
    (tmp_path / "cache").write_bytes(pickle.dumps([0, 1, 0, 1]))
    (tmp_path / "a.jpg").write_bytes(EPS)
    source = datasets.find("torchvision:Keeps", DataOptions(root=tmp_path))
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")  # as where Ghostscript is installed
    with pytest.raises(BadImageError, match="another program"):
        source.train[0].read()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
