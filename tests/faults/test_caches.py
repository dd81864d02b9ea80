"""Shared, damaged, read-only or full caches: correct results, or a one-sentence error."""

import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cofima.core.errors import CofimaError, CofimaWarning
from cofima.core.progress import Progress
from cofima.data import Sample
from cofima.data.loading import cache, loader
from cofima.data.loading.pixel_format import PixelFormat
from cofima.training.feature_cache import FeatureCache
from faults.nobody import as_nobody, open_folder

FORM = PixelFormat(16)
PROCESSES = 4
FORK = multiprocessing.get_context("fork")
ROWS = {number.to_bytes(16, "big"): torch.arange(4.0) + number for number in range(6)}


class Heard(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder that others may read, with an empty cache in it."""
    with open_folder() as folder:
        monkeypatch.setenv("COFIMA_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture
def samples(place: Path) -> list[Sample]:
    """Return images in files that were not just written, so that their pixels are kept."""
    made = []
    for number in range(6):
        path = place / f"{number}.png"
        Image.fromarray(np.random.RandomState(number).randint(0, 256, (20, 25, 3), np.uint8)).save(path)
        os.utime(path, (1e9, 1e9))
        made.append(Sample(path.name, 0, path.read_bytes))
    return made


@pytest.fixture(params=["few", "many"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Few images are copied into memory, many are mapped."""
    monkeypatch.setattr(loader, "IN_MEMORY", 10**9 if request.param == "few" else 0)
    return str(request.param)


def right(samples: list[Sample]) -> Tensor:
    return loader.load(samples, FORM, on_disk=False).pixels


def pixel_files(place: Path) -> list[Path]:
    return [path for path in sorted((place / "cache").glob("pixels/*/*")) if path.is_file()]


def damaged(whole: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(whole))
    flipped = bytes([whole[at] ^ 1 << chance.randrange(8)])
    return chance.choice(
        [whole[:at], whole[:at] + flipped + whole[at + 1 :], whole[:at] + chance.randbytes(9) + whole[at:]]
    )


def together(work: Callable[[], None]) -> list[int | None]:
    """Do the same in several processes at once; return their exit codes."""
    start = FORK.Barrier(PROCESSES)

    def run() -> None:
        start.wait()
        work()

    running = [FORK.Process(target=run) for _ in range(PROCESSES)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    return [process.exitcode for process in running]


def test_processes_that_share_a_damaged_cache_of_pixels_all_have_the_right_ones(
    kept: str, samples: list[Sample], place: Path
) -> None:
    """Each of them finds the damage; the one that mends it is not disturbed by the others."""
    wanted = right(samples)

    def work() -> None:
        assert torch.equal(loader.load(samples, FORM).pixels, wanted)

    for round_ in range(2):
        for path in pixel_files(place)[:1] if round_ % 2 else pixel_files(place)[1:]:
            path.write_bytes(damaged(path.read_bytes(), random.Random(round_)))
        assert together(work) == [0] * PROCESSES


@pytest.mark.parametrize("number", [12, pytest.param(2000, marks=pytest.mark.slow)])
def test_bytes_at_random_in_a_cache_of_pixels(
    number: int, kept: str, samples: list[Sample], place: Path
) -> None:
    wanted, chance = right(samples), random.Random(2)
    for _ in range(number):
        assert torch.equal(loader.load(samples, FORM).pixels, wanted)
        path = chance.choice(pixel_files(place))
        path.write_bytes(damaged(path.read_bytes(), chance))


@pytest.mark.parametrize("number", [12, pytest.param(2000, marks=pytest.mark.slow)])
def test_bytes_at_random_in_a_cache_of_features(number: int, tmp_path: Path) -> None:
    """A row is what was kept, or is not there; then it is computed and kept again."""
    folder, chance = tmp_path / "features", random.Random(3)
    for _ in range(number):
        FeatureCache(folder).add(ROWS)
        (path,) = folder.iterdir()
        path.write_bytes(damaged(path.read_bytes(), chance))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CofimaWarning)
            found = FeatureCache(folder)
            assert all(torch.equal(found.take([key])[0], row) for key, row in ROWS.items() if key in found)


def test_a_read_only_cache_is_read(kept: str, samples: list[Sample]) -> None:
    wanted = loader.load(samples, FORM).pixels
    with as_nobody():
        assert torch.equal(loader.load(samples, FORM, progress=(heard := Heard())).pixels, wanted)
    assert not [line for line in heard.said if "kept in" not in line]


@pytest.mark.parametrize("damage", ["bit", "index", "unreadable", "empty"])
def test_a_read_only_cache_that_does_not_serve_is_one_sentence(
    damage: str, kept: str, samples: list[Sample], place: Path
) -> None:
    """Few images are then read into memory; many need another place."""
    wanted = loader.load(samples, FORM).pixels.clone()
    index, pixels = pixel_files(place)
    if damage == "empty":
        index.unlink()
    elif damage == "unreadable":
        index.parent.chmod(0)
    else:
        path = index if damage == "index" else pixels
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    heard = Heard()
    with as_nobody():
        if kept == "few":
            assert torch.equal(loader.load(samples, FORM, progress=heard).pixels, wanted)
            assert "COFIMA_CACHE" in heard.said[-1]
        else:
            with pytest.raises(CofimaError, match="COFIMA_CACHE"):
                loader.load(samples, FORM)
    index.parent.chmod(0o755)


def test_a_place_that_is_no_folder_is_one_sentence(
    kept: str, samples: list[Sample], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COFIMA_CACHE", str(place / "0.png"))
    if kept == "few":
        heard = Heard()
        assert torch.equal(loader.load(samples, FORM, progress=heard).pixels, right(samples))
        assert "COFIMA_CACHE" in heard.said[-1]
    else:
        with pytest.raises(CofimaError, match="COFIMA_CACHE"):
            loader.load(samples, FORM)


def test_a_cache_that_is_being_built_is_not_removed_by_others(
    samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be read makes a cache useless, and its users remove it."""
    monkeypatch.setattr(loader, "IN_MEMORY", 0)
    samples[3].read.__self__.write_bytes(b"no image")  # type: ignore[attr-defined]

    def work() -> None:
        assert [bool(fault) for fault in loader.load(samples, FORM).faults] == [n == 3 for n in range(6)]

    assert together(work) == [0] * PROCESSES


@pytest.mark.parametrize("closed", ["features", "features/key", "file"])
def test_features_that_may_not_be_read_or_mended_are_computed(closed: str, place: Path) -> None:
    folder = place / "features" / "key"
    FeatureCache(folder).add(ROWS)
    (file,) = folder.iterdir()
    if closed == "file":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        (place / closed).chmod(0)
    with as_nobody(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = FeatureCache(folder)
        assert not any(key in found for key in ROWS)
        found.add(ROWS)
        assert torch.equal(found.take(ROWS), torch.stack(list(ROWS.values())))
    assert 1 <= len(said) <= 2
    (place / "features").chmod(0o755)
    folder.chmod(0o755)


@pytest.mark.parametrize(
    "keys", [torch.zeros(1, dtype=torch.uint8), torch.full((1, 16), 2**40), torch.zeros(2, 8)]
)
def test_a_foreign_file_of_features_is_not_taken_for_keys(keys: Tensor, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"names": keys, "rows": torch.zeros(len(keys), 4)}, tmp_path / "theirs.safetensors")
    with pytest.warns(CofimaWarning, match="damaged or foreign"):
        assert not FeatureCache(tmp_path).files


def test_the_index_of_a_cache_vouches_for_every_pixel(samples: list[Sample], place: Path) -> None:
    loader.load(samples, FORM)
    (_, pixels) = pixel_files(place)
    assert pixels.name == cache.PIXELS
    whole = pixels.read_bytes()
    for at in range(0, len(whole), 997):
        pixels.write_bytes(whole[:at] + bytes([whole[at] ^ 128]) + whole[at + 1 :])
        heard = Heard()
        assert torch.equal(loader.load(samples, FORM, progress=heard).pixels, right(samples))
        assert "damaged" in heard.said[0]
