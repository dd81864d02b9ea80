"""Pixels are decoded once, in memory or on disk, also after a kill, damage or a changed file."""

import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.data import Sample
from cofima.data.image_set import ImageSet
from cofima.data.loading import cache, loader
from cofima.data.loading.decoder import BadImageError
from cofima.data.loading.loader import Loaded, decode_all, load, load_small
from cofima.data.loading.pixel_format import PixelFormat

FORM = PixelFormat(side=16, size=14, whole=19)


class Listener(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.read = 0

    def say(self, message: str) -> None:
        self.said.append(message)

    def track(self, items, total, label):  # type: ignore[no-untyped-def]
        for item in items:
            self.read += "reading" in label
            yield item


@pytest.fixture(autouse=True)
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Send even a few images to a cache of this test's own, three to a piece."""
    monkeypatch.setenv("COFIMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "IN_MEMORY", 0)
    monkeypatch.setattr(cache, "_CHUNK", 3 * FORM.bytes)
    return tmp_path / "cache" / "pixels"


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    return [picture(tmp_path / "images" / f"{number}.png", number) for number in range(10)]


def picture(path: Path, number: int) -> Sample:
    path.parent.mkdir(exist_ok=True)
    values = np.random.RandomState(number).randint(0, 256, (20 + number, 25, 3), np.uint8)
    Image.fromarray(values).save(path)
    return Sample(path.name, number % 2, path.read_bytes)


def in_memory(samples: list[Sample], form: PixelFormat = FORM) -> torch.Tensor:
    return torch.stack([form.encode(Image.open(one.read.__self__).convert("RGB")) for one in samples])  # type: ignore[attr-defined]


def built(place: Path) -> Path:
    (folder,) = (one for one in place.iterdir() if one.is_dir())
    return folder


def test_a_cache_holds_the_pixels_that_memory_would(samples: list[Sample], on_disk: Path) -> None:
    got = load(samples, FORM)
    assert torch.equal(got.pixels, in_memory(samples))
    assert got.faults == [""] * 10
    assert len(set(got.hashes)) == 10
    assert (built(on_disk) / cache.PIXELS).stat().st_size == 10 * FORM.bytes
    assert {file.name for file in built(on_disk).iterdir()} == {cache.PIXELS, cache.INDEX}


def test_a_second_look_reads_no_picture(samples: list[Sample]) -> None:
    first, listener = load(samples, FORM), Listener()
    again = load(samples, FORM, progress=listener)
    assert listener.read == 0
    assert torch.equal(first.pixels, again.pixels)
    assert (first.hashes, first.faults) == (again.hashes, again.faults)


def test_a_journal_beside_the_index_goes(samples: list[Sample], on_disk: Path) -> None:
    """A kill after the index was written leaves one."""
    load(samples, FORM)
    (built(on_disk) / cache.JOURNAL).touch()
    load(samples, FORM)
    assert {file.name for file in built(on_disk).iterdir()} == {cache.PIXELS, cache.INDEX}


def test_size_and_place_are_said_first(samples: list[Sample], on_disk: Path) -> None:
    listener = Listener()
    load(samples, FORM, progress=listener)
    assert listener.said[0].startswith("10 images, 0.0 GB, are kept in ")
    assert str(on_disk) in listener.said[0]


def test_writing_to_the_pixels_does_not_change_the_cache(samples: list[Sample]) -> None:
    before = load(samples, FORM).pixels.clone()
    load(samples, FORM).pixels[:] = 0
    assert torch.equal(load(samples, FORM).pixels, before)


def test_another_form_file_or_name_is_another_cache(samples: list[Sample], on_disk: Path) -> None:
    load(samples, FORM)
    load(samples, PixelFormat(16))
    changed = picture(samples[3].read.__self__, 77)  # type: ignore[attr-defined]
    assert torch.equal(load(samples, FORM).pixels, in_memory(samples))
    load([*samples[:3], changed, Sample("other", 0, samples[4].read), *samples[5:]], FORM)
    assert len([one for one in on_disk.iterdir() if one.is_dir()]) == 4


@pytest.mark.parametrize("after", [0, 2, 3, 7])
def test_a_build_that_was_cut_off_goes_on(samples: list[Sample], after: int, on_disk: Path) -> None:
    class CutOffError(Exception):
        pass

    class Cutting(Listener):
        def track(self, items, total, label):  # type: ignore[no-untyped-def]
            for number, item in enumerate(items):
                if "reading" in label and number == after:
                    raise CutOffError
                yield item

    with pytest.raises(CutOffError):
        load(samples, FORM, progress=Cutting())
    assert not (built(on_disk) / cache.INDEX).exists()
    listener = Listener()
    got = load(samples, FORM, progress=listener)
    assert listener.read == 10 - after // 3 * 3  # whole pieces are not read again
    assert torch.equal(got.pixels, in_memory(samples))
    assert all(got.hashes)


@pytest.mark.parametrize("damage", ["half a line", "foreign", "pixels"])
def test_what_the_journal_cannot_vouch_for_is_read_again(
    samples: list[Sample], damage: str, on_disk: Path
) -> None:
    expected = load(samples, FORM)
    folder = built(on_disk)
    found = list(zip(expected.hashes, expected.faults, strict=True))
    rows = expected.pixels.numpy()
    lines = [
        json.dumps([found[at : at + 3], cache.zlib.crc32(rows[at : at + 3].copy().data)]) for at in (0, 3)
    ]
    (folder / cache.INDEX).unlink()
    if damage == "pixels":
        with (folder / cache.PIXELS).open("r+b") as file:
            file.seek(4 * FORM.bytes)
            file.write(b"damage")
    else:
        lines[1] = lines[1][:20] if damage == "half a line" else "[3, 3]"
    (folder / cache.JOURNAL).write_text("\n".join(lines))
    listener = Listener()
    got = load(samples, FORM, progress=listener)
    assert "3 of 10 images were read before" in listener.said[1]
    assert torch.equal(got.pixels, in_memory(samples))


def in_a_child(work: Callable[[], object]) -> int:
    """Start a process that works and ends; return its id. Forked: starting Python anew takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(0)


def test_killed_from_outside(samples: list[Sample]) -> None:
    class Deadly(type(Path())):  # type: ignore[misc]
        def read_bytes(self) -> bytes:
            os.kill(os.getpid(), signal.SIGKILL)
            return b""

    deadly = [*samples]
    deadly[7] = Sample("7.png", 1, Deadly(samples[7].read.__self__).read_bytes)  # type: ignore[attr-defined]
    _, status = os.waitpid(in_a_child(lambda: load(deadly, FORM)), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    listener = Listener()
    got = load(samples, FORM, progress=listener)
    assert listener.read == 4  # two pieces of three were on disk
    assert torch.equal(got.pixels, in_memory(samples))


@pytest.mark.parametrize("damage", ["index", "empty index", "deep index", "short", "long", "gone", "bit"])
def test_a_damaged_cache_is_built_again(samples: list[Sample], damage: str, on_disk: Path) -> None:
    load(samples, FORM)
    folder = built(on_disk)
    index, pixels = folder / cache.INDEX, folder / cache.PIXELS
    if damage == "index":
        index.write_text(index.read_text().replace('"format": 2', '"format": 3'))
    elif damage.endswith("index"):
        index.write_text("" if damage == "empty index" else "[" * 100_000)
    elif damage == "gone":
        pixels.unlink()
    elif damage == "bit":
        whole = pixels.read_bytes()
        pixels.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    else:
        pixels.write_bytes(pixels.read_bytes()[:-1] if damage == "short" else pixels.read_bytes() + b"x")
    listener = Listener()
    got = load(samples, FORM, progress=listener)
    assert any("damaged" in line and "built again" in line for line in listener.said)
    assert listener.read == 10
    assert torch.equal(got.pixels, in_memory(samples))


def test_a_full_disk_is_told_before_any_work(
    samples: list[Sample], on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=10 * FORM.bytes - 1)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CofimaError, match=r"needs 0.0 GB for 10 images, and 0.0 GB are free .* COFIMA_CACHE"):
        load(samples, FORM)
    assert not on_disk.exists()


def test_a_place_that_cannot_be_written_is_told(
    samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    with pytest.raises(CofimaError, match=r"may not be written to; set COFIMA_CACHE"):
        load(samples, FORM)


def test_an_error_while_writing_keeps_what_is_done(
    samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "posix_fallocate", full)
        with pytest.raises(CofimaError, match="No space left on device"):
            load(samples, FORM)
    assert torch.equal(load(samples, FORM).pixels, in_memory(samples))


def test_two_processes_at_once_read_once(samples: list[Sample], tmp_path: Path) -> None:
    def work(name: str) -> None:
        listener = Listener()
        got = load(samples, FORM, progress=listener)
        (tmp_path / name).write_text(f"{listener.read} {int(got.pixels.long().sum())}")

    for child in [in_a_child(lambda name=name: work(name)) for name in "ab"]:  # type: ignore[misc]
        os.waitpid(child, 0)
    said = sorted((tmp_path / name).read_text().split() for name in "ab")
    right = str(int(in_memory(samples).long().sum()))
    assert said == [["0", right], ["10", right]]


def test_faults_are_found_and_a_cache_with_faults_is_kept_only_if_they_are_skipped(
    samples: list[Sample], tmp_path: Path, on_disk: Path
) -> None:
    (tmp_path / "images" / "4.png").write_bytes(b"no image")
    got = load(samples, FORM)
    assert [place for place, fault in enumerate(got.faults) if fault] == [4]
    assert "not an image" in got.faults[4]
    assert not [one for one in on_disk.iterdir() if one.is_dir()]
    assert load(samples, FORM, despite_faults=True).faults == got.faults
    listener = Listener()
    assert load(samples, FORM, despite_faults=True, progress=listener).faults == got.faults
    assert listener.read == 0


def test_pictures_that_are_no_files_are_known_by_their_content(on_disk: Path) -> None:
    arrays = [np.random.RandomState(n).randint(0, 256, (70, 80, 3), np.uint8) for n in range(3)]
    made = [Sample(str(n), 0, lambda n=n: arrays[n]) for n in range(3)]  # type: ignore[misc]
    first = load(made, FORM).pixels.clone()
    arrays[1] = 255 - arrays[1]
    second = load(made, FORM).pixels
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, True]


def arrays_of(*shapes: tuple[int, ...]) -> list[Sample]:
    values = [np.random.RandomState(n).randint(0, 256, shape, np.uint8) for n, shape in enumerate(shapes)]
    return [Sample(str(n), 0, lambda one=one: one) for n, one in enumerate(values)]  # type: ignore[misc]


def test_small_images_of_one_shape_stay_as_they_are(on_disk: Path) -> None:
    small = arrays_of((8, 9, 3), (8, 9, 3))
    parts = load_small([small[:1], small[1:]])
    assert parts is not None
    assert [tuple(part.pixels.shape) for part in parts] == [(1, 3, 8, 9)] * 2
    for part, one in zip(parts, small, strict=True):
        assert np.array_equal(part.pixels[0].permute(1, 2, 0).numpy(), one.read())
    assert load(small, FORM).pixels.shape == (2, 3, 8, 9)
    assert not on_disk.exists()


@pytest.mark.parametrize("shapes", [[(8, 9, 3), (9, 8, 3)], [(65, 65, 3)]])
def test_other_arrays_are_kept_in_the_form(shapes: list[tuple[int, ...]]) -> None:
    assert load_small([arrays_of(*shapes)]) is None
    assert load(arrays_of(*shapes), FORM).pixels.shape == (len(shapes), FORM.bytes)


def test_arrays_that_are_no_pictures_are_faults() -> None:
    got = load(arrays_of((8, 9, 5), (8, 9, 3), (8, 9), (8, 9, 4)), FORM)
    assert "must be [H, W], [H, W, 3] or [H, W, 4], not [8, 9, 5]" in got.faults[0]
    assert got.faults[1:] == ["", "", ""]


def test_the_fingerprint_follows_content_labels_and_order(samples: list[Sample]) -> None:
    def of(got: Loaded, rows: list[int], labels: list[int]) -> str:
        return got.fingerprint(ImageSet(got.pixels, torch.tensor(rows), torch.tensor(labels)))

    got = load(samples, FORM)
    prints = {
        of(got, [0, 1], [0, 1]),
        of(got, [1, 0], [0, 1]),
        of(got, [0, 1], [1, 0]),
        of(got, [0], [0]),
        of(load(samples, PixelFormat(16)), [0, 1], [0, 1]),
    }
    assert len(prints) == 5
    assert of(load(samples, FORM), [0, 1], [0, 1]) in prints


@pytest.fixture
def few(samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """Return samples that fit into memory, in files that were not just written."""
    monkeypatch.setattr(loader, "IN_MEMORY", 10 * FORM.bytes + 1)
    for sample in samples:
        os.utime(sample.read.__self__, (1e9, 1e9))  # type: ignore[attr-defined]
    return samples


def test_few_files_are_in_memory_and_found_again(few: list[Sample], on_disk: Path) -> None:
    first, listener = load(few, FORM), Listener()
    again = load(few, FORM, progress=listener)
    assert listener.read == 0
    assert listener.said == []
    assert torch.equal(again.pixels, in_memory(few))
    assert (first.hashes, first.faults) == (again.hashes, again.faults)
    assert first.cache is again.cache is None  # so that the fingerprint is that of pixels
    shutil.rmtree(built(on_disk))
    assert torch.equal(again.pixels, in_memory(few))


def test_few_files_that_cannot_be_kept_are_decoded(
    few: list[Sample], on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    listener = Listener()
    assert torch.equal(load(few, FORM, progress=listener).pixels, in_memory(few))
    assert "may not be written to" in listener.said[0]
    assert not on_disk.exists()


def test_few_files_are_not_kept_while_they_change_or_if_they_are_none(
    few: list[Sample], on_disk: Path
) -> None:
    picture(few[3].read.__self__, 3)  # type: ignore[attr-defined]
    load(few, FORM)
    load([Sample(one.name, 0, lambda one=one: one.read()) for one in few], FORM)  # type: ignore[misc]
    load([], FORM)
    assert not on_disk.exists()


def test_old_small_caches_make_room(
    few: list[Sample], on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders() -> set[Path]:
        return {one for one in on_disk.iterdir() if one.is_dir()} if on_disk.exists() else set()

    made = []
    for used, (some, form) in enumerate([(few, PixelFormat(200)), (few[:4], FORM), (few[4:], FORM)]):
        before = folders()
        load(some, form)
        made += folders() - before
        os.utime(made[-1], (used, used))
    large, older, newer = made  # the first does not fit into memory: it is never removed
    load(few[:4], FORM)  # used again
    assert older.stat().st_mtime > newer.stat().st_mtime
    monkeypatch.setattr(cache, "SMALL_CACHES", (older / cache.PIXELS).stat().st_blocks * 512)
    load(few[:4], FORM)
    assert folders() == {large, older}


def test_files_and_images_in_memory_are_decoded_in_order_and_only_a_little_ahead(tmp_path: Path) -> None:
    picture(tmp_path / "one.png", 1)
    (tmp_path / "bad.png").write_text("bad")
    asked = []

    def images():  # type: ignore[no-untyped-def]
        for number in range(300):
            asked.append(number)
            yield (tmp_path / "one.png", np.full((4, 4, 3), 9, np.uint8), str(tmp_path / "bad.png"))[
                number % 3
            ]

    found = decode_all(images(), PixelFormat(8))
    first = [next(found) for _ in range(5)]
    assert len(asked) < 100
    assert [one.name for one in first[:3]] == [
        str(tmp_path / "one.png"),
        "image 1",
        str(tmp_path / "bad.png"),
    ]
    assert first[4].name == "image 4"
    assert [one.pixels is None for one in first] == [False, False, True, False, False]
    assert "not an image" in first[2].fault
    assert (first[1].pixels == 9).all()


def test_a_wrong_array_is_an_error_where_a_wrong_file_is_a_fault() -> None:
    with pytest.raises(BadImageError, match=r"must be \[H, W\]"):
        list(decode_all([np.zeros((4, 4, 7), np.uint8)], PixelFormat(8)))
