"""A split by its name and its hash, so that results on different splits are never mixed."""

from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256

from cofima.data.images import ImageSet
from cofima.data.options import DataOptions
from cofima.data.source import Picture, Source

Named = Iterable[tuple[str, int]]  # the name and the label of each image


def by_row(images: ImageSet) -> Named:
    """Name images that have no names by where they are stored."""
    return ((str(row), label) for row, label in images.named())


def split_hash(train: Named, test: Named) -> str:
    """Return a hash of which images, in which order and with which labels, are trained and tested on."""
    digest = sha256()
    for part, images in (("train", train), ("test", test)):
        for name, label in images:
            digest.update(f"{part}\t{label}\t{name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def seeded(options: DataOptions) -> str:
    """Name a split that the seed and the share of test images decide."""
    share = "" if options.test_share == 0.2 else f"-share{options.test_share:g}"
    return f"seed{options.split_seed}{share}"


def split_facts(split_id: str, train: Named, test: Named) -> dict[str, str]:
    """Return what a result file says of a split."""
    return {"split_id": split_id, "split_hash": split_hash(train, test)}


def with_split(source: Source) -> Source:
    """Return the source with the name and the hash of its split, and its counts, among its facts."""
    facts = source.facts | {"train": len(source.train), "test": len(source.test)}
    facts |= split_facts(f"{source.name}:{source.variant}", _named(source.train), _named(source.test))
    return replace(source, facts=facts)


def _named(pictures: Iterable[Picture]) -> Named:
    return ((picture.name, picture.label) for picture in pictures)
