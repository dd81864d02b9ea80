"""Learn, extend, undo, run and lock; with ``windows`` as the second word, without all that only Unix has.

``python learn_without_unix.py FOLDER windows|unix`` prints a hash of the weights after each step.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: F401 - before its system is taken away

from windows import hide_unix

if sys.argv[2] == "windows":
    hide_unix()
    assert not hasattr(os, "O_NOFOLLOW")

from PIL import Image

import cofima
import tiny
from cofima.core import lock, system
from cofima.core.atomic import file_digest, open_append, write_aside
from cofima.core.errors import CofimaError
from cofima.core.signals import handle_signals
from cofima.data.sources.in_memory import blobs
from cofima.store import model_folder

SETTINGS = ("data.flip=false", "data.crop=1", "device=cpu", "model.pretrained=false", "train.batch_size=8")
SETTINGS += ("options.align.epochs=1", "options.align.samples_per_class=4")


def photographs(folder: Path) -> None:
    """Write three classes of images, two below "photos" and one below "more"."""
    images = blobs(3, per_class=8, side=16).train
    for label, part in enumerate(("photos", "photos", "more")):
        where = folder / part / f"class {label}"
        where.mkdir(parents=True)
        for place in (images.labels == label).nonzero().flatten()[:6]:
            pixels, _ = images.batch(place[None])
            Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(where / f"{int(place)}.png")


def show(step: str, folder: Path) -> None:
    """Print the classes and the hash of the weights in force."""
    generation = model_folder.read(folder)
    generation.verify()
    weights = file_digest(generation.path / model_folder.WEIGHTS)
    print(step, len(generation.record.classes), weights, sorted(path.name for path in folder.iterdir()))


def refused(folder: Path) -> bool:
    """Hold the folder as another process does; return True if it cannot be locked meanwhile."""
    handle = os.open(folder / lock.NAME, os.O_RDWR | os.O_CREAT)
    assert lock.try_lock_file(handle)
    try:
        with lock.folder_lock(folder):
            return False
    except CofimaError as error:
        return "is being written by another process" in str(error)
    finally:
        os.close(handle)


def main(folder: Path) -> None:
    """Do each thing once."""
    model = folder / "model"
    photographs(folder)
    with handle_signals():
        known = cofima.learn(folder / "photos", model, backbone="vit_test", epochs=1, settings=SETTINGS)
    show("learn", model)
    known.extend(folder / "more", settings=["train.epochs=1"])
    known.save()
    show("extend", model)
    model_folder.undo(model)
    show("undo", model)
    print("load", cofima.load(model).classes)
    tiny.Tiny.run(folder / "run", tiny.Tiny.config("coma", train={"epochs": 1}), tiny.Tiny.stream((2, 2), 8))
    show("run", folder / "run")
    print("lock", refused(model), refused(folder / "run"))
    with lock.folder_lock(folder / "new" / "empty"), lock.folder_lock(folder / "new" / "empty"):
        print("held", (folder / "new" / "empty" / lock.HOLDER).read_text().startswith("process "))
    print("nothing is left", (folder / "new").exists())
    (folder / "link").symlink_to(folder / "run")
    try:
        open_append(folder / "link").close()
    except OSError as error:
        print("link", error.strerror)
    (folder / "place").mkdir()
    with write_aside(folder / "place") as aside:
        aside.mkdir()
    print("in place of an empty folder", (folder / "place").is_dir(), system.is_running(os.getpid()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
