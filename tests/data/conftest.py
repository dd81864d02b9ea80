"""Small datasets in the exact formats in which the real ones come."""

import gzip
import struct
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from scipy.io import savemat

BIRDS = ("001.Albatross", "002.Auklet", "003.Bunting")
CARS = ("Acura RL Sedan 2012", "BMW X5 SUV 2007", "AM General Hummer SUV 2000")  # not in order of name
WNIDS = ("n01443537", "n01484850", "n12267677")


def jpeg(seed: int) -> bytes:
    """Return a photograph unlike any of another seed."""
    pixels = np.random.RandomState(seed).randint(0, 256, (6, 8, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def class_folders(
    root: Path, classes: tuple[str, ...], train: int = 3, test: int = 2, other: str = "test"
) -> None:
    """Write train/CLASS and test/CLASS."""
    seed = 0
    for part, count in (("train", train), (other, test)):
        for name in classes:
            for _ in range(count):
                seed += 1
                write(root / part / name / f"{seed:04}.jpg", jpeg(seed))


def unsplit(root: Path, classes: tuple[str, ...], each: int = 5) -> None:
    for label, name in enumerate(classes):
        for number in range(each):
            write(root / name / f"art_{number}.jpg", jpeg(100 * label + number))


def python2_pickle(values: dict[str, object]) -> bytes:
    """Return what Python 2's cPickle.dump(values, file, 2) writes, as CIFAR's authors did."""

    def text(word: bytes) -> bytes:
        return (
            b"U" + bytes([len(word)]) + word
            if len(word) < 256
            else b"T" + struct.pack("<I", len(word)) + word
        )

    def dump(value: object) -> bytes:
        if isinstance(value, str):
            return text(value.encode())
        if isinstance(value, int):
            return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)
        if isinstance(value, list):
            return b"](" + b"".join(map(dump, value)) + b"e"
        assert isinstance(value, np.ndarray)
        kind = (
            b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        )
        rows, columns = (dump(length) for length in value.shape)
        start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        return start + b"(K\x01" + rows + columns + b"\x86" + kind + b"\x89" + text(value.tobytes()) + b"tb"

    items = b"".join(text(key.encode()) + dump(value) for key, value in values.items())
    return b"\x80\x02}(" + items + b"u."


def cifar_files(classes: int = 3) -> dict[str, bytes]:
    names = [f"thing {n}" for n in range(classes)]
    found = {"meta": python2_pickle({"fine_label_names": names, "coarse_label_names": ["things"]})}
    for seed, (part, each) in enumerate((("train", 4), ("test", 2))):
        labels = [n % classes for n in range(each * classes)]
        data = np.random.RandomState(seed).randint(0, 256, (len(labels), 3072), np.uint8)
        found[part] = python2_pickle(
            {
                "filenames": [f"{n}.png" for n in range(len(labels))],
                "batch_label": f"{part}ing batch 1 of 1",
                "fine_labels": labels,
                "coarse_labels": [0] * len(labels),
                "data": data,
            }
        )
    return found


def cifar100_python(root: Path) -> None:
    for name, content in cifar_files().items():
        write(root / "cifar-100-python" / name, content)


def cifar100_archive(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(root / "cifar-100-python.tar.gz", "w:gz") as tar:
        for name, content in cifar_files().items():
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(content)
            tar.addfile(member, BytesIO(content))


def cub200_raw(root: Path) -> None:
    lists: dict[str, list[str]] = {name: [] for name in ("images", "train_test_split", "image_class_labels")}
    key = 0
    for label, bird in enumerate(BIRDS, start=1):
        for number in range(5):
            key += 1
            path = f"{bird}/Bird_{number:04}_{key}.jpg"
            write(root / "CUB_200_2011" / "images" / path, jpeg(key))
            lists["images"].append(f"{key} {path}")
            lists["train_test_split"].append(f"{key} {int(number % 2 == 0)}")
            lists["image_class_labels"].append(f"{key} {label}")
    for name, lines in lists.items():
        write(root / "CUB_200_2011" / f"{name}.txt", "\n".join(lines).encode())
    write(
        root / "CUB_200_2011" / "classes.txt", "\n".join(f"{n} {b}" for n, b in enumerate(BIRDS, 1)).encode()
    )


def cub200_folders(root: Path) -> None:
    class_folders(root / "data" / "cub", BIRDS)


BOX = {f"bbox_{side}": 1 for side in ("x1", "y1", "x2", "y2")}


def records(rows: list[dict[str, object]]) -> np.ndarray:
    """Return a MATLAB struct array."""
    table = np.empty((1, len(rows)), dtype=[(key, object) for key in rows[0]])
    for place, row in enumerate(rows):
        table[0, place] = tuple(row.values())
    return table


def titles() -> np.ndarray:
    cells = np.empty((1, len(CARS)), dtype=object)
    cells[0, :] = CARS
    return cells


def cars196_devkit(root: Path) -> None:
    home = root / "stanford_cars"
    (home / "devkit").mkdir(parents=True)
    for seed, (part, where, each) in enumerate(
        (("train", "devkit/cars_train_annos", 3), ("test", "cars_test_annos_withlabels", 2))
    ):
        rows = []
        for number in range(each * 3):
            write(home / f"cars_{part}" / f"{number + 1:05}.jpg", jpeg(100 * seed + number))
            rows.append({**BOX, "class": number % 3 + 1, "fname": f"{number + 1:05}.jpg"})
        savemat(home / f"{where}.mat", {"annotations": records(rows)})
    savemat(home / "devkit" / "cars_meta.mat", {"class_names": titles()})


def cars196_annos(root: Path) -> None:
    rows = []
    for number in range(15):
        path = f"car_ims/{number + 1:06}.jpg"
        write(root / "cars196" / path, jpeg(number))
        rows.append({"relative_im_path": path, **BOX, "class": number % 3 + 1, "test": int(number >= 9)})
    savemat(root / "cars196" / "cars_annos.mat", {"annotations": records(rows), "class_names": titles()})


def cars196_folders(root: Path) -> None:
    class_folders(root / "cars196", CARS, other="val")


def imagenet_r_folders(root: Path) -> None:
    class_folders(root / "imagenet-r", WNIDS)


def imagenet_r_unsplit(root: Path) -> None:
    unsplit(root / "imagenet-r", WNIDS)
    write(root / "imagenet-r" / "README.txt", b"n01443537 goldfish")


def imagenet_r_tar(root: Path) -> None:
    imagenet_r_unsplit(root / "unpacked")
    with tarfile.open(root / "imagenet-r.tar", "w") as tar:
        tar.add(root / "unpacked" / "imagenet-r", "imagenet-r")


def imagenet_r_lists(root: Path) -> None:
    imagenet_r_unsplit(root)
    for part, numbers in (("train", (0, 3, 4)), ("test", (1, 2))):
        paths = [f"data/imagenet-r/{wnid}/art_{n}.jpg" for n in numbers for wnid in WNIDS]
        lists = {"data": paths, "targets": [WNIDS.index(path.split("/")[2]) for path in paths]}
        write(root / "imagenet-r" / f"imagenet-r_{part}.yaml", yaml.safe_dump(lists).encode())


def vtab_folders(root: Path) -> None:
    class_folders(root / "vtab-cil" / "vtab", ("9", "10", "11"))


def vtab_nested(root: Path) -> None:
    for part in ("dtd", "resisc45", "oxford_pets"):
        class_folders(root / "vtab" / part, ("a", "b"))
        for path in sorted((root / "vtab" / part).rglob("*.jpg")):
            seed = 1000 * len(part) + int(path.stem)
            path.write_bytes(jpeg(seed))


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">{1 + values.ndim}I", 0x800 + values.ndim, *values.shape) + values.tobytes()


def fashion_mnist_idx(root: Path, compressed: bool = False) -> None:
    for seed, (stem, each) in enumerate((("train", 3), ("t10k", 1))):
        labels = np.repeat(np.arange(10, dtype=np.uint8), each)
        images = np.random.RandomState(seed).randint(0, 256, (len(labels), 28, 28)).astype(np.uint8)
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            path = root / "FashionMNIST" / "raw" / f"{stem}-{kind}-ubyte"
            content = gzip.compress(idx(values)) if compressed else idx(values)
            write(path.with_name(path.name + ".gz") if compressed else path, content)


MAKERS: dict[tuple[str, str], Callable[[Path], None]] = {
    ("cars196", "annos"): cars196_annos,
    ("cars196", "devkit"): cars196_devkit,
    ("cars196", "folders"): cars196_folders,
    ("cifar100", "archive"): cifar100_archive,
    ("cifar100", "python"): cifar100_python,
    ("cub200", "folders"): cub200_folders,
    ("cub200", "raw"): cub200_raw,
    ("fashion_mnist", "idx"): fashion_mnist_idx,
    ("imagenet_r", "folders"): imagenet_r_folders,
    ("imagenet_r", "lists"): imagenet_r_lists,
    ("imagenet_r", "tar"): imagenet_r_tar,
    ("imagenet_r", "unsplit"): imagenet_r_unsplit,
    ("vtab", "folders"): vtab_folders,
    ("vtab", "nested"): vtab_nested,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``layout`` for every dataset in every layout, if it does not choose itself."""
    chosen = any("layout" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "layout" in metafunc.fixturenames and not chosen:
        metafunc.parametrize(("dataset", "layout"), MAKERS, ids=["-".join(key) for key in MAKERS])


@pytest.fixture(scope="session")
def make() -> Callable[..., None]:
    """Return a function that writes a dataset in a layout below a folder."""

    def write_files(dataset: str, layout: str, root: Path, **more: bool) -> None:
        MAKERS[dataset, layout](root, **more)

    return write_files


@pytest.fixture(scope="session")
def photograph() -> Callable[[int], bytes]:
    """Return a maker of JPEG files, one for each seed."""
    return jpeg


@pytest.fixture(scope="session")
def tried() -> set[tuple[str, str]]:
    """Return every dataset and layout that tests are run for."""
    return set(MAKERS)


@pytest.fixture(scope="session")
def old_pickle() -> Callable[[dict[str, object]], bytes]:
    """Return a writer of pickles as Python 2 wrote them."""
    return python2_pickle
