"""One process for all trials, and a folder with everything that a command may need."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cofima.data.sources.in_memory import blobs
from faults.harness import LEARN, RUN, Server


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
    from PIL import Image

    folder = tmp_path_factory.mktemp("prepared")
    images = blobs(5, per_class=8, side=16).train
    for label, part in enumerate(("photos", "photos", "others", "others", "more")):
        where = folder / part / f"class {label}"
        where.mkdir(parents=True)
        for place in (images.labels == label).nonzero().flatten()[:6]:
            pixels, _ = images.batch(place[None])
            Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(where / f"{int(place)}.png")
    for words in (
        ("learn", "photos", *LEARN, "-o", "a"),
        ("extend", "a", "more", "train.epochs=0"),
        ("learn", "others", *LEARN, "-o", "b"),
        (*RUN, "--out", "done"),
    ):
        done = server.run(folder, words)
        assert done.code == 0, done.said
    return folder
