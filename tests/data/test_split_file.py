"""Splits that a file gives, and manifests: written, read, trusted only if intact."""

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from cofima.core.errors import CofimaError, CofimaWarning
from cofima.data import Source, datasets, sources
from cofima.data.datasets import DataOptions
from cofima.data.sources.checks import verify
from cofima.data.sources.split_file import read_manifest, write_manifest

pytestmark = pytest.mark.filterwarnings("ignore:.*known for:cofima.core.errors.CofimaWarning")


@pytest.fixture
def renditions(make, tmp_path: Path) -> Path:
    make("imagenet_r", "unsplit", tmp_path)
    return tmp_path


def find(root: Path, **more: Any) -> Source:
    return sources.find("imagenet_r", DataOptions(root=root, **more))


def names(samples: Any) -> list[str]:
    return [picture.name for picture in samples]


def test_a_manifest_says_everything_and_gives_the_same_split_again(renditions: Path) -> None:
    source = find(renditions, split_seed=7)
    path = write_manifest(source, verify(source), renditions / "splits")
    head, rows = read_manifest(path)
    assert path.name == "imagenet_r-seed7.jsonl"
    assert (head["split_id"], head["split_hash"]) == ("imagenet_r:seed7", source.facts["split_hash"])
    assert [row["name"] for row in rows] == names(source.train) + names(source.test)
    for row in rows:
        content = (renditions / "imagenet-r" / row["name"]).read_bytes()
        assert row["sha256"] == sha256(content).hexdigest()
    again = find(renditions, split_file=path)
    assert again.facts["split_hash"] == source.facts["split_hash"]
    assert again.variant == "imagenet_r-seed7"


def test_a_manifest_that_was_changed_or_cut_is_refused(renditions: Path) -> None:
    source = find(renditions)
    path = write_manifest(source, verify(source), renditions)
    whole = path.read_text()
    for damaged in (whole.replace("art_1", "art_9"), whole[:-40], "{}\n", "", whole.replace("train", "test")):
        path.write_text(damaged)
        with pytest.raises(CofimaError, match=r"changed or cut|not a manifest"):
            find(renditions, split_file=path)


def test_manifests_go_to_the_cache(renditions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COFIMA_CACHE", str(renditions / "cache"))
    source = find(renditions)
    assert write_manifest(source, verify(source)).parent == renditions / "cache" / "splits"


def test_a_text_file_lists_the_test_images(renditions: Path) -> None:
    tested = [f"n01443537/art_{n}.jpg" for n in (1, 2)] + ["n01484850/art_0.jpg", "n12267677/art_4.jpg"]
    (renditions / "mine.txt").write_text("\n".join(tested) + "\n\n")
    source = find(renditions, split_file=renditions / "mine.txt")
    assert source.facts["split_id"] == "imagenet_r:mine"
    assert names(source.test) == tested
    assert len(source.train) == 15 - 4


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_two_lists_in_one_file(suffix: str, renditions: Path) -> None:
    whole = find(renditions)
    lists = {"train": names(whole.test), "test": names(whole.train)[:9]}
    file = renditions / f"mine.{suffix}"
    file.write_text(json.dumps(lists) if suffix == "json" else yaml.safe_dump(lists))
    with pytest.warns(CofimaWarning, match="3 images of imagenet_r are in neither list"):
        source = find(renditions, split_file=file)
    assert sorted(names(source.train)) == sorted(names(whole.test))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("no.txt", None, "no such file"),
        ("mine.txt", "n01443537/art_9.jpg", "n01443537/art_9.jpg: there is no such image"),
        ("mine.yaml", "train: [n01443537/art_1.jpg]", "not a split file"),
        ("mine.yaml", "- a", "not a split file"),
        ("mine.yaml", "train: 3\ntest: 4", "not a split file"),
        (
            "mine.yaml",
            "train: [n01443537/art_1.jpg]\ntest: [n01443537/art_1.jpg]",
            "both trained and tested on",
        ),
        ("mine.jsonl", "[]", "not a manifest"),
        ("folder", "", "needs both"),
    ],
)
def test_a_wrong_split_file_is_one_error(name: str, text: str | None, said: str, renditions: Path) -> None:
    if name == "folder":
        (renditions / name).mkdir()
    elif text is not None:
        (renditions / name).write_text(text)
    with pytest.raises(CofimaError, match=said):
        find(renditions, split_file=renditions / name)


def test_two_lists_in_a_folder(make, tmp_path: Path) -> None:
    make("imagenet_r", "lists", tmp_path / "a")
    make("imagenet_r", "unsplit", tmp_path / "b")
    listed = find(tmp_path / "a")
    taken = find(tmp_path / "b", split_file=tmp_path / "a" / "imagenet-r")
    assert taken.facts["split_hash"] == listed.facts["split_hash"]


@pytest.mark.parametrize("given", [False, True])
def test_a_folder_is_listed_as_it_is_loaded(given: bool, make, tmp_path: Path) -> None:
    make("imagenet_r", "folders" if given else "unsplit", tmp_path)
    name, options = f"folder:{tmp_path}/imagenet-r", DataOptions(split_seed=3)
    source, loaded = datasets.find(name, options), datasets.load(name, 8, options=options)
    assert source.facts["split_hash"] == loaded.facts["split_hash"]
    expected = f"folder:imagenet-r:{'given' if given else 'seed3'}"
    assert source.facts["split_id"] == loaded.facts["split_id"] == expected
    assert source.class_names == loaded.class_names


@pytest.mark.parametrize("name", ["digits", "blobs"])
def test_what_is_in_memory_has_a_split_and_can_be_checked(name: str) -> None:
    one, other = (datasets.find(name, DataOptions(split_seed=seed)) for seed in (0, 1))
    loaded = datasets.load(name, 8, options=DataOptions())
    assert one.facts["split_hash"] == loaded.facts["split_hash"]
    assert one.facts["split_id"] == f"{name}:seed0"
    if name == "digits":
        assert other.facts["split_hash"] != one.facts["split_hash"]
    found = verify(one)
    assert not found.faults
    assert len(found.train) == len(one.train)


def test_a_split_file_that_never_ends_or_is_too_deep_is_one_error(renditions: Path) -> None:
    os.mkfifo(renditions / "pipe.txt")
    (renditions / "deep.jsonl").write_text("[" * 100_000)
    (renditions / "deep.yaml").write_text("[" * 100_000)
    (renditions / "self.yaml").write_text("train: &a [*a]\ntest: *a")
    (renditions / "zero.yaml").symlink_to("/dev/zero")
    expected = {
        "pipe.txt": "a pipe",
        "zero.yaml": "a device",
        "deep.jsonl": "not a",
        "deep.yaml": "levels deep",
    }
    for name, said in (expected | {"self.yaml": "contains itself"}).items():
        with pytest.raises(CofimaError, match=said):
            find(renditions, split_file=renditions / name)
