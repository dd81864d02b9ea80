"""A user's folder: both layouts, every problem at once, what may be skipped, splits that stay put."""

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cofima.core.errors import CofimaError, CofimaWarning
from cofima.core.progress import Progress
from cofima.data.datasets import DataOptions, find, load
from cofima.data.loading import loader
from cofima.data.loading.decoder import decode_file
from cofima.data.loading.pixel_format import center_square
from cofima.data.stream import Dataset

CALTECH = Path(__file__).parents[3] / "shared" / "data" / "caltech101"
SIDE = 8


def picture(path: Path, number: int) -> Path:
    """Write a picture that no other number has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.RandomState(number).randint(0, 256, (9, 11, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


def unsplit(root: Path, counts: dict[str, int]) -> Path:
    for place, (name, count) in enumerate(counts.items()):
        for number in range(count):
            picture(root / name / f"{number:03}.png", 1000 * place + number)
    return root


def given(root: Path, test: str = "test") -> Path:
    unsplit(root / "train", {"cat": 3, "dog": 4})
    for place, name in enumerate(["cat", "dog"]):
        for number in range(2):
            picture(root / test / name / f"{number}.png", 9000 + 10 * place + number)
    return root


def read(root: Path, **options: object) -> Dataset:
    return load(f"folder:{root}", SIDE, options=DataOptions.model_validate(options))


def refused(root: Path, **options: object) -> str:
    with pytest.raises(CofimaError) as caught:
        read(root, **options)
    return str(caught.value)


def examined(dataset: Dataset) -> set[bytes]:
    return {dataset.test.pixels[row].numpy().tobytes() for row in dataset.test.rows.tolist()}


@pytest.mark.parametrize("test", ["test", "val", "Test"])
def test_given_split_is_kept(tmp_path: Path, test: str) -> None:
    dataset = read(given(tmp_path, test))
    assert dataset.class_names == ("cat", "dog")
    assert dataset.train.counts() == {0: 3, 1: 4}
    assert dataset.test.counts() == {0: 2, 1: 2}
    assert dataset.facts["split"] == f"given: train + {test}"
    assert dataset.facts["split_seed"] is None
    assert (dataset.flip, dataset.crop) == (True, 0.5)
    assert dataset.train.pixels is dataset.test.pixels
    json.dumps(dataset.facts)


def test_pixels_are_the_fitted_files_in_order_of_name(tmp_path: Path) -> None:
    dataset = read(given(tmp_path))
    files = sorted((tmp_path / "train").glob("*/*.png"))
    expected = torch.stack([center_square(decode_file(file), SIDE) for file in files])
    assert torch.equal(dataset.train.batch(torch.arange(7))[0], expected)


def test_test_goes_before_val_and_unused_folders_are_told(tmp_path: Path) -> None:
    given(tmp_path, "test")
    given(tmp_path, "val")
    (tmp_path / "notes").mkdir()
    facts = read(tmp_path).facts
    assert facts["split"] == "given: train + test"
    assert facts["unused_folders"] == ["notes", "val"]


@pytest.mark.parametrize(("count", "share", "held"), [(10, 0.2, 2), (2, 0.2, 1), (3, 0.9, 2), (7, 0.5, 4)])
def test_unsplit_folder_is_split_per_class(tmp_path: Path, count: int, share: float, held: int) -> None:
    dataset = read(unsplit(tmp_path, {"a": count, "b": 10}), test_fraction=share)
    assert dataset.test.counts()[0] == held
    assert dataset.train.counts()[0] == count - held
    assert set(dataset.train.rows.tolist()).isdisjoint(dataset.test.rows.tolist())
    assert dataset.facts["split"] == f"per class, {share:g} tested"


def test_split_is_stable_and_seeded(tmp_path: Path) -> None:
    root = unsplit(tmp_path / "one", {"a": 20, "b": 20})
    first = examined(read(root))
    assert examined(read(root)) == first
    assert examined(read(root, split_seed=1)) != first
    shutil.copytree(root, tmp_path / "elsewhere")
    assert examined(read(tmp_path / "elsewhere")) == first


def test_split_does_not_depend_on_the_order_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = unsplit(tmp_path, {"a": 20, "b": 20})
    usual = read(root)
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path), reverse=True)))
    other = read(root)
    assert examined(other) == examined(usual)
    assert other.facts["fingerprint"] == usual.facts["fingerprint"]


def test_one_more_image_does_not_reshuffle_the_others(tmp_path: Path) -> None:
    root = unsplit(tmp_path, {"a": 20, "b": 20})
    before = examined(read(root))
    picture(root / "a" / "new.png", 77)
    assert len(before - examined(read(root))) <= 1


def test_all_suffixes_subfolders_and_hidden_files(tmp_path: Path) -> None:
    unsplit(tmp_path, {"b": 2})
    for number, suffix in enumerate(["jpg", "JPEG", "Png", "bmp", "gif", "webp", "tif", "TIFF"]):
        picture(tmp_path / "a" / "deep" / f"er{number}" / f"x.{suffix}", number)
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "a" / ".hidden.jpg").write_text("ignored")
    (tmp_path / "a" / ".cache").mkdir()
    (tmp_path / "a" / ".cache" / "x.jpg").write_text("ignored")
    (tmp_path / ".git").mkdir()
    (tmp_path / "__MACOSX").mkdir()
    dataset = read(tmp_path)
    assert dataset.class_names == ("a", "b")
    assert dataset.facts["train"] + dataset.facts["test"] == 8 + 2


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    unsplit(tmp_path / "data", {"a": 3})
    unsplit(tmp_path / "elsewhere", {"other": 1, "linked": 4})
    (tmp_path / "data" / "b").symlink_to(tmp_path / "elsewhere" / "linked")
    (tmp_path / "data" / "a" / "up").symlink_to(tmp_path / "data" / "a")
    (tmp_path / "elsewhere" / "linked" / "loop").symlink_to(tmp_path / "elsewhere" / "linked")
    dataset = read(tmp_path / "data")
    assert (dataset.facts["train"], dataset.facts["test"]) == (2 + 3, 1 + 1)


def damage(root: Path) -> None:
    """Put one of everything that is wrong into a split folder."""
    (root / "train" / "cat" / "text.jpg").write_text("no image")
    (root / "train" / "cat" / "empty.png").touch()
    (root / "test" / "dog" / "gone.png").symlink_to(root / "nowhere.png")
    whole = picture(root / "train" / "dog" / "half.jpg", 5)
    whole.write_bytes(whole.read_bytes()[:-150])
    (root / "train" / "hollow").mkdir()
    (root / "test" / "hollow").mkdir()
    picture(root / "train" / "learned" / "0.png", 6)
    picture(root / "test" / "examined" / "0.png", 7)


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    damage(given(tmp_path))
    picture(tmp_path / "train" / "Cat " / "0.png", 8)
    picture(tmp_path / "test" / "Cat " / "0.png", 81)
    text = refused(tmp_path)
    assert text.startswith(f"{tmp_path} has 8 problems:\n")
    for line in (
        f"{tmp_path}/train/cat/text.jpg: not an image",
        f"{tmp_path}/train/cat/empty.png: empty file",
        f"{tmp_path}/test/dog/gone.png: no such file",
        f"{tmp_path}/train/dog/half.jpg: truncated",
        "class 'hollow': no images",
        "class 'learned': images in train only, none in test",
        "class 'examined': images in test only, none in train",
        "duplicate class names, the same but for case, spaces or Unicode form: 'train/Cat ', 'test/Cat '",
    ):
        assert line.split(": '")[0] in text
    assert "'train/cat'" in text


def test_bad_images_and_classes_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    clean = read(given(tmp_path))
    damage(tmp_path)
    with pytest.warns(CofimaWarning) as warned:
        dataset = read(tmp_path, skip_unreadable=True)
    assert len(warned) == 1
    assert "left out 4 unreadable images and 3 classes" in str(warned[0].message)
    assert warned[0].filename == __file__
    assert dataset.facts["skipped"]["images"] == 4
    assert dataset.facts["skipped"]["classes"] == 3
    assert dataset.class_names == ("cat", "dog")
    assert dataset.facts["fingerprint"] == clean.facts["fingerprint"]


def test_a_class_of_only_bad_images_is_skipped_whole(tmp_path: Path) -> None:
    unsplit(tmp_path, {"a": 3, "c": 3})
    for number in range(3):
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / f"{number}.png").write_text("bad")
    assert refused(tmp_path).count("not an image") == 3
    with pytest.warns(CofimaWarning, match="3 unreadable images and 1 class "):
        dataset = read(tmp_path, skip_unreadable=True)
    assert dataset.class_names == ("a", "c")
    assert set(dataset.train.labels.tolist()) == {0, 1}


def test_nothing_left_after_skipping_is_an_error(tmp_path: Path) -> None:
    unsplit(tmp_path, {"a": 1})
    assert "class 'a': 1 image, too few to train and test" in refused(tmp_path, skip_unreadable=True)


@pytest.mark.parametrize(("one", "other"), [("cat", "Cat"), ("cat", " cat"), ("caf\u00e9", "cafe\u0301")])
def test_duplicate_names_are_never_skipped(tmp_path: Path, one: str, other: str) -> None:
    unsplit(tmp_path, {one: 2, other: 2, "dog": 2})
    text = refused(tmp_path, skip_unreadable=True)
    assert "1 problem:" in text
    assert f"/{one}'" in text
    assert f"/{other}'" in text


def test_a_class_too_small_to_split(tmp_path: Path) -> None:
    text = refused(unsplit(tmp_path, {"a": 1, "b": 2}))
    assert text == f"{tmp_path} has 1 problem:\n  class 'a': 1 image, too few to train and test"


def test_a_folder_without_classes(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 0)
    assert "has no classes: put the images of each class into a folder" in refused(tmp_path)


def test_half_a_split_is_not_taken_for_a_class(tmp_path: Path) -> None:
    unsplit(tmp_path / "train", {"a": 3, "b": 3})
    assert f"none called test or val; to split it, use folder:{tmp_path}/train" in refused(tmp_path)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    assert read(unsplit(tmp_path, {"bus": 3, "train": 3})).class_names == ("bus", "train")


def test_long_lists_are_cut(tmp_path: Path) -> None:
    unsplit(tmp_path, {"a": 2})
    for number in range(51):
        (tmp_path / "a" / f"bad{number:02}.png").write_text("bad")
    lines = refused(tmp_path).split("\n")
    assert lines[0].endswith("has 51 problems:")
    assert len(lines) == 22
    assert lines[-1] == "  ... and 31 more"


def test_stray_images_are_a_fact_not_an_error(tmp_path: Path) -> None:
    unsplit(tmp_path, {"a": 2, "b": 2})
    picture(tmp_path / "stray.png", 1)
    with pytest.warns(CofimaWarning, match="1 image outside the class folders"):
        assert read(tmp_path).facts["stray_images"] == 1


def test_copies_in_train_and_test_are_told(tmp_path: Path) -> None:
    given(tmp_path)
    shutil.copy(tmp_path / "train" / "cat" / "000.png", tmp_path / "test" / "dog" / "copy.png")
    with pytest.warns(CofimaWarning, match="1 test image also in the training part"):
        assert read(tmp_path).facts["train_test_overlap"] == 1


def test_no_warning_without_cause(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(given(tmp_path)).facts["train_test_overlap"] == 0


def test_a_closed_folder_is_one_of_the_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unsplit(tmp_path, {"a": 2, "b": 2, "c": 1})
    listed = Path.iterdir

    def closed(path: Path) -> Iterator[Path]:
        if path.name == "a":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", closed)
    text = refused(tmp_path)
    assert f"{tmp_path}/a: permission denied" in text
    assert "class 'c': 1 image" in text
    assert "2 problems" in text


def test_each_file_is_decoded_once_and_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    decode = loader.decode
    monkeypatch.setattr(loader, "decode", lambda content: seen.append(content) or decode(content))

    class Listener(Progress):
        def track(self, items, total, label):  # type: ignore[no-untyped-def]
            self.total, done = total, list(items)
            self.done = len(done)
            yield from done

    listener = Listener()
    load(f"folder:{given(tmp_path)}", SIDE, options=DataOptions(), progress=listener)
    assert len(seen) == len(set(seen)) == 11
    assert (listener.total, listener.done) == (11, 11)


@pytest.mark.skipif(not CALTECH.is_dir(), reason=f"{CALTECH} is not there")
def test_photographs(tmp_path: Path) -> None:
    names = sorted(folder.name for folder in (CALTECH / "train").iterdir())[:3]
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        for name in names:
            (tmp_path / part / name).symlink_to(CALTECH / part / name)
    dataset = load(f"folder:{tmp_path}", 64, options=DataOptions())
    assert dataset.class_names == tuple(names)
    assert len(dataset.train) == sum(len(list((CALTECH / "train" / name).glob("*.jpg"))) for name in names)
    assert 40 < dataset.train.pixels.float().mean() < 220


def test_listing_and_loading_agree_on_the_split(tmp_path: Path) -> None:
    unsplit(tmp_path, {"a": 9, "b": 12, "alone": 1})
    options = DataOptions(skip_unreadable=True, split_seed=3)
    source = find(f"folder:{tmp_path}", options)
    with pytest.warns(CofimaWarning, match="0 unreadable images and 1 class "):
        dataset = load(f"folder:{tmp_path}", SIDE, options=options)
    for key in ("split_id", "split_hash", "train", "test", "split", "folder"):
        assert source.facts[key] == dataset.facts[key]
    assert [one.label for one in source.train] == dataset.train.labels.tolist()
    assert source.class_names == dataset.class_names == ("a", "b")
    with pytest.raises(CofimaError, match="class 'alone': 1 image, too few to train and test"):
        find(f"folder:{tmp_path}", DataOptions())
