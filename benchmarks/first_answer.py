"""Time to the first answer of `learn` and `extend`, over one pass of the photographs through the backbone.

``python benchmarks/first_answer.py`` prints the section of RESULTS.md.
"""

import os
import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

import cofima
from cofima.classifier.learn import CROP
from cofima.core.progress import SILENT
from cofima.data.sources.listing import find_images
from cofima.experiment.config import check
from cofima.experiment.stream import make_view
from cofima.models import backbone
from pipeline import photographs
from ratios import cells, interleaved

CLASSES, PER_CLASS, NEW_CLASSES = 15, 25, 3
NAME, BATCH, ROUNDS = "tf_efficientnet_lite0", 32, 5


def write_photographs(folder: Path, classes: range) -> None:
    """Write JPEG files of 500 x 375 pixels: random crops of two photographs, in colors of their class."""
    for label in classes:
        chance = np.random.default_rng(label)
        color = chance.uniform(0.5, 1.5, 3)
        (folder / f"class{label:02}").mkdir(parents=True)
        for number in range(PER_CLASS):
            image = photographs()[int(chance.integers(2))]
            side = int(chance.integers(80, 400))
            left, top = chance.integers(image.width - side), chance.integers(image.height - side)
            crop = image.crop((left, top, left + side, top + side)).resize((500, 375))
            pixels = np.clip(np.asarray(crop) * color, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"class{label:02}" / f"{number}.jpg", quality=90)


def one_pass(photos: Path) -> None:
    """Read the photographs, build the backbone, and compute the features of each."""
    config = check({"dataset": "digits", "backbone": NAME, "device": "cpu"})
    module, facts = backbone.create(NAME, config.model, 0)
    view = make_view(config, facts, flip=True, crop=CROP)
    found = find_images(photos)
    read = found.read(view.pixel_format, skip_unreadable=False, progress=SILENT)
    images = read.split(found.classes, found.classes, 0.0, 0).train
    module.eval()
    with torch.inference_mode():
        for index in torch.arange(len(images)).split(BATCH):
            module(view.test(images.batch(index)[0]))


def main() -> str:
    """Measure; return a section of Markdown."""
    torch.set_num_threads(1)
    number = count()
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ):
        folder = Path(name)
        old, new = folder / "photos", folder / "more"
        write_photographs(old, range(CLASSES))
        write_photographs(new, range(CLASSES, CLASSES + NEW_CLASSES))
        cofima.learn(old, folder / "model", fast=True)

        def learn() -> None:
            os.environ["COFIMA_CACHE"] = str(folder / f"cache{next(number)}")  # no features are found again
            cofima.learn(old, folder / f"model{next(number)}", fast=True)

        def extend() -> None:
            os.environ["COFIMA_CACHE"] = str(folder / f"cache{next(number)}")
            cofima.load(folder / "model").extend(new, fast=True)

        ways = {
            "`learn --fast`": interleaved(partial(one_pass, old), {"ours": learn}, ROUNDS)["ours"],
            "`extend --fast`": interleaved(partial(one_pass, new), {"ours": extend}, ROUNDS)["ours"],
        }
    return "\n".join(
        [
            "## The first answer",
            "",
            f"{CLASSES * PER_CLASS} photographs of 500 x 375 pixels in {CLASSES} classes, then",
            f"{NEW_CLASSES * PER_CLASS} in {NEW_CLASSES} new ones, EfficientNet-Lite0 at 224 px, one",
            "thread: CPU time of learning them (features, the head in closed form, its leave-one-out",
            "accuracy, calibration, the saved model) over one bare pass: reading the photographs, building",
            "the backbone, and a forward pass over each.",
            "",
            "| | median | smallest | target |",
            "|---|---|---|---|",
            *(f"| {way} | {cells(found)} | <= 1.3x |" for way, found in ways.items()),
            "",
        ]
    )


if __name__ == "__main__":
    print(main())
