"""One process for all trials, and a folder with everything that a command may need."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cofima.data.sources.in_memory import blobs
from data.conftest import cifar100_archive
from faults.harness import GRID, LEARN, PUBLISHED, RUN, Server

PHOTOS = {"photos": (0, 1), "others": (2, 3), "more": (4,), "many": (4, 5, 6, 7)}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    made = Server(tmp_path_factory.mktemp("shim"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def prepared(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with photographs, two classifiers, and a run."""
    folder = tmp_path_factory.mktemp("prepared")
    draw_photos(folder)
    (folder / "grid.yaml").write_text(GRID)
    cifar100_archive((folder / PUBLISHED).parent)
    for words in (
        ("learn", "photos", *LEARN, "--fast", "-o", "a"),
        ("extend", "a", "more", "--fast"),
        ("learn", "others", *LEARN, "--fast", "-o", "b"),
        (*RUN, "--out", "done"),
    ):
        done = server.run(folder, words)
        assert done.code == 0, done.said
    return folder


def draw_photos(folder: Path) -> None:
    """Draw a folder of classes for each purpose; the files are old, as a cache of their pixels wants it."""
    from PIL import Image

    images = blobs(8, per_class=8, side=16).train
    for purpose, labels in PHOTOS.items():
        for label in labels:
            where = folder / purpose / f"class {label}"
            where.mkdir(parents=True)
            for place in (images.labels == label).nonzero().flatten()[:6]:
                pixels, _ = images.batch(place[None])
                path = where / f"{int(place)}.png"
                Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(path)
                os.utime(path, (10**9, 10**9))
