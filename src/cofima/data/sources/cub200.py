"""CUB-200-2011: photographs of 200 species of birds."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cofima.core.errors import file_error, first_problems
from cofima.data.download import RemoteFile
from cofima.data.loading.loader import Sample
from cofima.data.sources.base import Copy, DatasetInfo, Download, Source, folders_named
from cofima.data.sources.folder import TRAIN_AND_TEST, train_test_copies

INFO = DatasetInfo(
    name="cub200",
    title="CUB-200-2011",
    classes=200,
    variants={"official": (5_994, 5_794), "pilot": (9_430, 2_358)},
    layouts={
        "raw": "CUB_200_2011/ with images.txt, train_test_split.txt, image_class_labels.txt and images/",
        "folders": f"cub/ (or cub_200/, CUB_200_2011/) with {TRAIN_AND_TEST}",
    },
    url="https://www.vision.caltech.edu/datasets/cub_200_2011/",
    download=Download(
        "CUB_200_2011",
        (
            RemoteFile(
                "CUB_200_2011.tgz",
                "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
                "md5:97eceeb196236b17998738112f37df78",
                "avalanche/benchmarks/datasets/cub200/cub200.py",
                1_150_585_339,  # tensorflow_datasets/url_checksums/caltech_birds2011.txt, of the same file
            ),
        ),
    ),
)
FOLDERS = ("cub", "cub200", "cub_200", "CUB_200_2011")
LISTS = ("images.txt", "train_test_split.txt", "image_class_labels.txt")


def find_copies(root: Path) -> Iterator[Copy]:
    """Yield the copies below a folder, without opening them."""
    folders = list(folders_named(root, FOLDERS))
    for folder in folders:
        if all((folder / name).is_file() for name in LISTS):
            yield Copy("raw", folder, partial(_open_raw, folder))
    yield from train_test_copies(INFO, folders)


def _open_raw(folder: Path) -> Source:
    found: list[str] = []
    paths, training, classes = (_table(folder / name, found) for name in LISTS)
    for name, table in zip(LISTS[1:], (training, classes), strict=True):
        if odd := sorted(paths.keys() ^ table.keys()):
            found.append(f"{name}: {len(odd)} images are not in it, or not in images.txt (first: {odd[0]})")
    found += [f"train_test_split.txt: '{v}' is not 0 or 1" for v in sorted({*training.values()} - {"0", "1"})]
    found += [f"{name}: no such file" for name in paths.values() if not (folder / "images" / name).is_file()]
    if found:
        raise first_problems(f"cub200 in {folder}", found)
    # class ids start at 1, in the order of the folders' names
    ids = sorted({*classes.values()}, key=int)
    number = {one: label for label, one in enumerate(ids)}
    titles = dict.fromkeys(ids, "") | {classes[key]: path.split("/")[0] for key, path in paths.items()}
    parts: tuple[list[Sample], list[Sample]] = [], []
    for key, path in paths.items():
        picture = Sample(path, number[classes[key]], (folder / "images" / path).read_bytes)
        parts[0 if training[key] == "1" else 1].append(picture)
    return INFO.source(parts, [titles[one] for one in ids])


def _table(file: Path, found: list[str]) -> dict[str, str]:
    """Read a file with a key and a value per line; append its problem, if any, to ``found``."""
    try:
        rows = [line.split(maxsplit=1) for line in file.read_text("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise file_error(file, error) from error
    except UnicodeDecodeError:
        rows = [[""]]
    if any(len(row) != 2 for row in rows):
        found.append(f"{file.name}: expected a number and a value in each line")
        return {}
    return {key: value.strip() for key, value in rows}
