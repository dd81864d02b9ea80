"""The embedded dataset: scikit-learn's scanned digits."""

from typing import Any

import torch
from torch.nn.functional import interpolate

from cofima.data.deal import choose, part
from cofima.data.images import ImageSet
from cofima.data.options import DataOptions
from cofima.data.splits import by_row, seeded, split_facts
from cofima.data.stream import Dataset


def digits(side: int, options: DataOptions) -> Dataset:
    """Return 1,797 digits of 8 x 8 pixels, enlarged to ``side``; a share of each class is tested on."""
    from sklearn.datasets import load_digits  # costs a second, and only this dataset needs it

    scans = load_digits()
    labels = torch.from_numpy(scans.target).long()
    grey = torch.from_numpy(scans.images * (255 / 16)).round().to(torch.uint8)[:, None]
    grey = interpolate(grey, size=(side, side), mode="bicubic", antialias=True)
    # three views of one grey channel: a third of the memory
    everything = ImageSet(grey.expand(-1, 3, -1, -1), torch.arange(len(labels)), labels)
    tested = choose(everything, lambda count: part(options.test_share, count), options.split_seed)
    facts: dict[str, Any] = {
        "train": int((~tested).sum()),
        "test": int(tested.sum()),
        "split": f"per class, {options.test_share:g} tested",
        "split_seed": options.split_seed,
        "fingerprint": everything.fingerprint(),
    }
    train, test = everything.select(~tested), everything.select(tested)
    facts |= split_facts(f"digits:{seeded(options)}", by_row(train), by_row(test))
    return Dataset("digits", tuple(map(str, range(10))), train, test, flip=False, crop=1.0, facts=facts)
