"""ImageNet-R: renditions (art, cartoons, toys, ...) of 200 ImageNet classes, without an official split."""

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from cofima.core.errors import CofimaError
from cofima.data.download import RemoteFile
from cofima.data.loading.decoder import read_file
from cofima.data.loading.loader import Sample
from cofima.data.sources.base import Copy, DatasetInfo, Download, Source, files_named, folders_named
from cofima.data.sources.folder import TRAIN_AND_TEST, train_test_copies
from cofima.data.sources.listing import SUFFIXES, list_images
from cofima.data.sources.split_file import split_by_names, two_lists

URL = "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar"
INFO = DatasetInfo(
    name="imagenet_r",
    title="ImageNet-R",
    classes=200,
    variants={"folders": (24_000, 6_000)},
    layouts={
        "folders": f"imagenet-r/ with {TRAIN_AND_TEST}",
        "lists": "imagenet-r/WNID/*.jpg or imagenet-r.tar, beside imagenet-r_train.yaml and _test.yaml",
        "unsplit": "imagenet-r/WNID/*.jpg; data.test_fraction of each class is tested on, by data.split_seed",
        "tar": "imagenet-r.tar, not compressed, not unpacked; split as an unsplit folder",
    },
    url=URL,
    crop=0.08,
    download=Download(
        "imagenet-r.tar",  # not unpacked: images are read directly from the archive
        (
            RemoteFile(
                "imagenet-r.tar",
                URL,
                "sha256:18c6bf493b39a0d975d48e587437f562caab9c52ae6327dcfa9dd8eb54aa1b52",
                "tensorflow_datasets/datasets/imagenet_r/checksums.tsv",
                2_191_079_936,
            ),
        ),
    ),
)
FOLDERS = ("imagenet-r", "imagenetr")


def find_copies(root: Path) -> Iterator[Copy]:
    """Yield the copies below a folder, without opening them."""
    folders = list(folders_named(root, FOLDERS))
    yield from train_test_copies(INFO, folders)
    unsplit = [folder for folder in folders if _has_wnids(folder)]
    tars = list(files_named(root, FOLDERS, ("imagenet-r.tar", "imagenet_r.tar")))
    for path in [*unsplit, *tars]:
        for place in (path, path.parent):
            if place.is_dir() and any(place.glob("*_train.yaml")):
                yield Copy("lists", path, partial(_open_lists, path, place))
    for path in [*unsplit, *tars]:
        yield Copy("tar" if path.is_file() else "unsplit", path, partial(_everything, path))


def _open_lists(path: Path, lists: Path) -> Source:
    return split_by_names(_everything(path), "lists", *two_lists(lists), str(lists))


def _everything(path: Path) -> Source:
    """List all images as training images; they are split afterwards."""
    paths = _in_tar(path) if path.is_file() else _in_folder(path)
    names = sorted({name.split("/")[0] for name in paths})
    number = {name: label for label, name in enumerate(names)}
    samples = [Sample(name, number[name.split("/")[0]], read) for name, read in paths.items()]
    # the papers report exactly 24,000 + 6,000 images, which per-class rounding would miss
    return replace(INFO.source((samples, []), names, "all"), exact_share=True)


def _in_folder(folder: Path) -> dict[str, partial[bytes]]:
    files = list_images(folder, f"imagenet_r in {folder}").files
    return {file.key: partial(read_file, file.path) for file in files}


def _in_tar(archive: Path) -> dict[str, partial[bytes]]:
    """Return a reader for each image at its offset in the archive, so that nothing is unpacked."""
    size = archive.stat().st_size
    found: dict[str, partial[bytes]] = {}
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                path = Path(member.name)
                if not member.isreg() or path.suffix.lower() not in SUFFIXES or path.name.startswith("."):
                    continue
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError("the archive ends within an image")
                key = "/".join(path.parts[-2:])
                found[key] = partial(_read_part, archive, member.offset_data, member.size)
    except tarfile.TarError as error:
        raise CofimaError(
            f"{archive} cannot be read ({error}): get it again if it is cut, unpack it if it is compressed"
        ) from error
    if not found:
        raise CofimaError(f"{archive} has no images in folders")
    return found


def _read_part(archive: Path, start: int, size: int) -> bytes:
    with archive.open("rb") as file:  # one handle per call, since many threads read at the same time
        file.seek(start)
        return file.read(size)


def _has_wnids(folder: Path) -> bool:
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    return any(name[:1] == "n" and name[1:].isdecimal() for name in names)
