"""A user's own folder of images as a source: listed and split, but not read."""

from pathlib import Path

from cofima.data.files import ImageFile, list_images, plain
from cofima.data.options import DataOptions
from cofima.data.source import Picture, Source
from cofima.data.sources._checks import refuse
from cofima.data.sources._folders import deal_by_seed
from cofima.data.splits import seeded, with_split
from cofima.errors import problems


def folder_source(root: Path, options: DataOptions) -> Source:
    """List the images of a folder, dealt as ``load_folder`` deals them; every image counts as usable."""
    listing = list_images(root)
    wrong = [*listing.wrong, *listing.duplicates()]
    if wrong:
        raise problems(str(root), wrong)
    names = sorted(listing.classes)
    parts: dict[str, list[Picture]] = {"all": [], "train": [], "test": []}
    for file in listing.files:
        parts[file.part].append(Picture(key_of(file), names.index(file.class_name), file.path.read_bytes))
    name, _, variant = split_id(root, unsplit := "all" in listing.parts, options).rpartition(":")
    facts = {"split": "given", "split_seed": None, "folder": plain(str(root.resolve()))}
    train, test = parts["all"] + parts["train"], parts["test"]
    source = Source(name, variant, tuple(names), train, test, flip=True, crop=0.5, facts=facts)
    source = deal_by_seed(source, options) if unsplit else source
    refuse(source, root)
    return with_split(source)


def key_of(file: ImageFile) -> str:
    """Name an image by its path below the folder; ``val`` is called ``test``."""
    return file.key if file.part == "all" else f"{file.part}/{file.key}"


def split_id(root: Path, unsplit: bool, options: DataOptions) -> str:
    """Name the split of a folder; its hash, not this name, tells two folders of one name apart."""
    return f"folder:{plain(root.resolve().name)}:{seeded(options) if unsplit else 'given'}"
