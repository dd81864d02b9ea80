"""Inputs of learn, extend and evaluate: class folders and CSV files, and held-out images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cofima.core.errors import CofimaError, CofimaWarning
from cofima.data.loading import loader
from cofima.data.loading.decoder import decode_file
from cofima.data.loading.pixel_format import PixelFormat
from cofima.data.sources.listing import LabeledImages, find_images

SQUARE = PixelFormat(8)


def picture(path: Path, number: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.RandomState(number).randint(0, 256, (9, 11, 3), np.uint8)).save(path)
    return path


def folder(root: Path, **counts: int) -> Path:
    for place, (name, count) in enumerate(counts.items()):
        for number in range(count):
            picture(root / name / f"{number:02}.png", 100 * place + number)
    return root


def out(read: LabeledImages, share: float, seed: int = 0) -> list[str]:
    return [file.key for file, held in zip(read.files, read.held_out(share, seed), strict=True) if held]


def test_pixels_and_labels_are_those_of_the_files(tmp_path: Path) -> None:
    read = find_images(folder(tmp_path, cat=2, dog=3)).read(SQUARE)
    images = read.images(["dog", "bird", "cat"])
    assert images.labels.tolist() == [2, 2, 0, 0, 0]
    expected = torch.stack([SQUARE.encode(decode_file(file.path)) for file in read.files])
    assert torch.equal(images.batch(torch.arange(5))[0], expected)


def test_a_share_of_each_class_of_five_or_more_is_held_out(tmp_path: Path) -> None:
    read = find_images(folder(tmp_path, a=10, b=4, c=5)).read(SQUARE)
    chosen = out(read, 0.2)
    assert [key[0] for key in chosen] == ["a", "a", "c"]
    assert out(read, 0.2) == chosen
    assert out(read, 0.2, seed=1) != chosen
    assert out(read, 0) == []


def test_an_image_that_is_there_twice_is_never_held_out(tmp_path: Path) -> None:
    folder(tmp_path, a=6)
    for name in ("00", "01", "02", "03"):
        (tmp_path / "a" / f"{name}x.png").write_bytes((tmp_path / "a" / f"{name}.png").read_bytes())
    assert out(find_images(tmp_path).read(SQUARE), 0.9) == ["a/04.png", "a/05.png"]


def test_a_test_part_is_reported_on_and_chooses_nothing(tmp_path: Path) -> None:
    folder(tmp_path / "train", a=8, b=8)
    folder(tmp_path / "test", b=2)
    found = find_images(tmp_path)
    read = found.read(SQUARE)
    split = read.split(["a", "b"], ["a", "b"], 0.5, 0)
    assert split.tested
    assert {read.files[row].part for row in split.report.rows.tolist()} == {"test"}
    assert (split.train.counts(), split.choose.counts()) == ({0: 4, 1: 4}, {0: 4, 1: 4})
    assert {read.files[row].part for row in split.choose.rows.tolist()} == {"train"}
    assert found.only("test").classes == ["b"]
    assert {file.class_name for file in found.of(["a"]).files} == {"a"}


def test_split_takes_some_classes(tmp_path: Path) -> None:
    read = find_images(folder(tmp_path, a=10, b=10, c=10)).read(SQUARE)
    split = read.split(["a", "c"], ["c", "old", "a"], 0.2, 0)
    parts = (split.train, split.choose, split.report)
    assert [part.counts() for part in parts] == [{0: 8, 2: 8}, {0: 1, 2: 1}, {0: 1, 2: 1}]
    assert len({row for part in parts for row in part.rows.tolist()}) == 20


def test_a_csv_file_holds_out_as_folders_of_the_same_names_do(tmp_path: Path) -> None:
    folder(tmp_path, a=10, b=7)
    paths = sorted(tmp_path.rglob("*.png"))
    lines = [f"{path.relative_to(tmp_path)}, {path.parent.name} " for path in paths]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]), "utf-8-sig")
    read = find_images(tmp_path / "list.csv").read(SQUARE)
    assert [file.path for file in read.files] == paths
    assert {file.class_name for file in read.files} == {"a", "b"}
    assert len(out(read, 0.2)) == 3


def test_every_wrong_line_of_a_csv_file_is_told_at_once(tmp_path: Path) -> None:
    picture(tmp_path / "one.png", 1)
    path = tmp_path / "list.csv"
    path.write_text("path,label\none.png,a\nnone.png,a\n,b\none.png,\n")
    with pytest.raises(
        CofimaError, match=r"3 problems:\n  line 3: .*none.png\n  line 4: path is empty\n  line 5"
    ):
        find_images(path)
    path.write_text("file,class\none.png,a\n")
    with pytest.raises(CofimaError, match="must name the columns path and label"):
        find_images(path)


def test_unreadable_images_are_one_error_or_left_out(tmp_path: Path) -> None:
    folder(tmp_path, a=3, b=3)
    (tmp_path / "a" / "01.png").write_text("bad")
    with pytest.raises(CofimaError, match=r"1 problem:\n  .*01.png: not an image"):
        find_images(tmp_path).read(SQUARE)
    with pytest.warns(CofimaWarning, match="left out 1 unreadable image$"):
        read = find_images(tmp_path).read(SQUARE, skip_unreadable=True)
    assert (len(read), len(read.pixels), len(read.hashes)) == (5, 5, 5)
    for path in (tmp_path / "a").iterdir():
        path.write_text("bad")
    with pytest.raises(CofimaError, match="class 'a': no image of it can be read"):
        find_images(tmp_path).read(SQUARE, skip_unreadable=True)


def test_photographs_are_never_copied_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COFIMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "IN_MEMORY", 0)
    find_images(folder(tmp_path / "photos", a=3)).read(SQUARE)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
