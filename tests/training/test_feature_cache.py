"""The feature cache: rows are found by any process, whatever happens to the files."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cofima.core.atomic import write_aside
from cofima.core.errors import CofimaWarning
from cofima.training import feature_cache
from cofima.training.feature_cache import FeatureCache


def named(*numbers: int) -> dict[bytes, Tensor]:
    """Return rows that can be told from their names."""
    return {number.to_bytes(16, "big"): torch.arange(4.0) + 10 * number for number in numbers}


def holds(one: FeatureCache, *numbers: int) -> bool:
    rows = named(*numbers)
    return all(name in one for name in rows) and torch.equal(one.take(rows), torch.stack(list(rows.values())))


def opened(folder: Path, asking_for: int) -> FeatureCache:
    """Return a shelf that was asked for a row already: the file of the row has been read."""
    one = FeatureCache(folder)
    holds(one, asking_for)
    return one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "features" / "key"


def test_rows_are_there_for_others_and_in_the_order_asked_for(folder: Path) -> None:
    first = FeatureCache(folder)
    first.add(named(1, 2))
    first.add(named(3))
    assert holds(first, 3, 1)
    again = FeatureCache(folder)
    assert holds(again, 2, 3, 1)
    assert not holds(again, 4)
    assert len(list(folder.iterdir())) == 2


def test_the_same_rows_twice_are_one_file(folder: Path) -> None:
    one, other = FeatureCache(folder), FeatureCache(folder)
    one.add(named(1, 2))
    other.add(named(1, 2))
    assert len(list(folder.iterdir())) == 1


def test_without_a_folder_rows_are_kept_in_memory_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = FeatureCache()
    one.add(named(1))
    assert holds(one, 1)
    assert not holds(FeatureCache(), 1)
    assert not list(tmp_path.iterdir())


def test_no_rows_are_no_file(folder: Path) -> None:
    FeatureCache(folder).add({})
    assert not folder.exists()


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "cut off": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "another format": lambda content: b"PK\x03\x04 not tensors" * 9,
    "one bit of a row": lambda content: flip(content, len(content) - 3),
    "the header": lambda content: flip(content, 9),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_announced_ignored_and_written_anew(damage, folder: Path) -> None:
    FeatureCache(folder).add(named(1, 2))
    FeatureCache(folder).add(named(3))
    (file,) = (file for file in folder.iterdir() if holds_in(file, 1))
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(CofimaWarning, match="damaged or foreign"):
        found = opened(folder, asking_for=1)
    assert not holds(found, 1)
    assert holds(found, 3)
    found.add(named(1, 2))
    assert holds(FeatureCache(folder), 1, 2, 3)  # and without a warning


def holds_in(file: Path, number: int) -> bool:
    return number.to_bytes(16, "big") in file.read_bytes()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_a_foreign_file_is_announced_and_left_alone(dtype: torch.dtype, folder: Path) -> None:
    FeatureCache(folder).add(named(1))
    theirs = folder / "theirs.safetensors"
    save_file({"names": torch.zeros(1, 16, dtype=dtype), "rows": torch.zeros(1, 4)}, theirs)
    with pytest.warns(CofimaWarning, match=r"theirs\.safetensors: damaged or foreign"):
        found = opened(folder, asking_for=0)
    assert not holds(found, 0)
    assert holds(found, 1)
    assert theirs.exists()


def test_a_file_of_another_key_is_not_taken(folder: Path) -> None:
    FeatureCache(folder).add(named(1))
    (file,) = folder.iterdir()
    other = folder.with_name("other")
    other.mkdir()
    file.rename(other / file.name)
    with pytest.warns(CofimaWarning, match="not what was written"):
        assert not holds(FeatureCache(other), 1)


def test_what_is_being_written_or_a_crash_left_half_written_is_not_looked_at(folder: Path) -> None:
    FeatureCache(folder).add(named(1))
    (whole,) = folder.iterdir()
    with write_aside(folder / whole.name) as aside:
        aside.write_bytes(whole.read_bytes()[:20])
        assert holds(FeatureCache(folder), 1)  # and no warning
        aside.write_bytes(whole.read_bytes())


def test_a_file_that_another_process_removed_is_missing_quietly(folder: Path) -> None:
    FeatureCache(folder).add(named(1))
    found = FeatureCache(folder)
    for file in folder.iterdir():
        file.unlink()
    assert not holds(found, 1)


def test_a_place_that_cannot_be_written_is_announced_once_and_the_rows_stay(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one = FeatureCache(tmp_path / "file" / "key")
    with pytest.warns(CofimaWarning, match="could not be kept for later runs") as said:
        one.add(named(1))
    one.add(named(2))  # a second warning would be an error
    assert len(said) == 1
    assert holds(one, 1, 2)


def add_many(folder: Path, first: int, start) -> None:
    start.wait()
    for number in range(first, first + 40, 2):
        FeatureCache(folder).add(named(number, number + 1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes that start at once need fork")
def test_two_processes_at_once_lose_nothing_and_tear_nothing(folder: Path) -> None:
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(2)
    workers = [fork.Process(target=add_many, args=(folder, first, start)) for first in (0, 20)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0]  # a warning would have been an error
    assert holds(FeatureCache(folder), *range(60))
    assert not list(folder.glob(".*"))


def test_above_the_limit_the_keys_not_used_for_longest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [tmp_path / f"key{number}" for number in range(4)]
    for age, key in enumerate(keys[:3]):
        FeatureCache(key).add(named(*range(50)))
        os.utime(key, (1000 + age, 1000 + age))
    size = sum(file.stat().st_size for file in keys[0].iterdir())
    monkeypatch.setattr(feature_cache, "LIMIT", 2.5 * size)
    assert holds(FeatureCache(keys[0]), 7)  # used now: no longer the first to go
    FeatureCache(keys[3]).add(named(*range(50)))
    assert [key.exists() for key in keys] == [True, False, False, True]
    monkeypatch.setattr(feature_cache, "LIMIT", 0)
    one = FeatureCache(keys[3])
    one.add(named(*range(50, 60)))
    assert [key.exists() for key in keys] == [False, False, False, True]
    assert holds(FeatureCache(keys[3]), *range(60))
