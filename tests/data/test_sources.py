"""The paper's datasets: found in every layout, counted, numbered, split; what is wrong is said at once."""

import re
import tarfile
import warnings
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.datasets import FashionMNIST, ImageFolder

from cofima.core.errors import CofimaError, CofimaWarning
from cofima.core.progress import Progress
from cofima.data import Source, datasets, sources
from cofima.data.datasets import DataOptions
from cofima.data.sources import imagenet_r
from cofima.data.sources.checks import count_problem, verify
from cofima.data.splits import apportion, share_of, shuffled, split_hash
from cofima.data.stream import split
from cofima.report.paper.published import published

small = pytest.mark.filterwarnings("ignore:.*known for:cofima.core.errors.CofimaWarning")
pytestmark = small  # these copies have fewer images than the real ones, which is said: see below


def options(root: Path, **more: Any) -> DataOptions:
    return DataOptions(root=root, **more)


def find(dataset: str, root: Path, **more: Any) -> Source:
    return sources.find(dataset, options(root, **more))


def contents(source: Source) -> dict[str, Any]:
    """Return what every image holds, read now."""
    return {picture.name: picture.read() for part in (source.train, source.test) for picture in part}


def test_every_layout_is_tried(tried: set[tuple[str, str]]) -> None:
    assert tried == {(name, layout) for name in sources.names() for layout in sources.info(name).layouts}


def test_a_dataset_is_what_its_files_say(dataset: str, layout: str, make, tmp_path: Path) -> None:
    make(dataset, layout, tmp_path)
    source = find(dataset, tmp_path)
    about = sources.info(dataset)
    assert (source.name, source.facts["layout"]) == (dataset, layout)
    assert (source.flip, source.crop) == (True, about.crop)
    assert len(set(source.class_names)) == len(source.class_names) >= 3
    names = [picture.name for part in (source.train, source.test) for picture in part]
    assert len(set(names)) == len(names)
    assert not [name for name in names if str(tmp_path) in name]  # the same on every machine
    classes = set(range(len(source.class_names)))
    assert {p.label for p in source.train} == {p.label for p in source.test} == classes
    assert len({c if isinstance(c, bytes) else c.tobytes() for c in contents(source).values()}) == len(names)
    assert (source.facts["train"], source.facts["test"]) == (len(source.train), len(source.test))
    assert source.facts["split_id"] == f"{dataset}:{source.variant}"
    assert not verify(source).faults
    assert not verify(source).shared


def test_a_dataset_becomes_tensors(dataset: str, layout: str, make, tmp_path: Path) -> None:
    make(dataset, layout, tmp_path)
    source = find(dataset, tmp_path)
    loaded = datasets.load(dataset, 8, options=options(tmp_path))
    assert loaded.name == dataset
    assert loaded.class_names == source.class_names
    assert (len(loaded.train), len(loaded.test)) == (len(source.train), len(source.test))
    for part, samples in ((loaded.train, source.train), (loaded.test, source.test)):
        _, labels = part.batch(torch.arange(len(part)))
        assert labels.tolist() == [picture.label for picture in samples]
    assert loaded.facts["split_hash"] == source.facts["split_hash"]


def test_the_split_has_a_hash_that_depends_on_names_labels_and_parts(
    dataset: str, layout: str, make, tmp_path: Path
) -> None:
    make(dataset, layout, tmp_path / "here")
    make(dataset, layout, tmp_path / "there")
    one, same = find(dataset, tmp_path / "here"), find(dataset, tmp_path / "there")
    assert one.facts["split_hash"] == same.facts["split_hash"]
    train, test = ([(p.name, p.label) for p in part] for part in (one.train, one.test))
    assert split_hash(train, test) == one.facts["split_hash"]
    changed = [
        (test, train),
        (train[1:], test),
        (train[::-1], test),
        ([(train[0][0], train[0][1] + 1), *train[1:]], test),
        ([("another", train[0][1]), *train[1:]], test),
        (train[:-1], [train[-1], *test]),
    ]
    assert len({split_hash(*parts) for parts in changed} | {one.facts["split_hash"]}) == len(changed) + 1


@pytest.mark.parametrize("name", sources.names())
def test_what_is_missing_is_said_once_with_all_that_helps(name: str, tmp_path: Path) -> None:
    about = sources.info(name)
    with pytest.raises(CofimaError) as caught:
        sources.find(name, options(tmp_path / "nowhere"))
    message = str(caught.value)
    assert message == datasets.missing(name, options(tmp_path / "nowhere"))
    for said in [
        about.title,
        about.url,
        *about.layouts.values(),
        f"{tmp_path}/nowhere (no such folder)",
        "--data-root",
    ]:
        assert said in message


@pytest.mark.parametrize("name", sources.names())
def test_known_counts_name_the_variant(name: str) -> None:
    about = sources.info(name)
    assert about.classes in (10, 50, 100, 196, 200)
    names = [str(n) for n in range(about.classes)]
    for variant, (train, test) in about.variants.items():
        assert about.variant(train, test) == variant
        source = replace(about.source(([], []), names), train=range(train), test=range(test))  # type: ignore[arg-type]
        assert count_problem(source, about) is None
        other = replace(source, train=range(train - 1))  # type: ignore[arg-type]
        assert about.variant(train - 1, test) == "other"
        said = str(count_problem(other, about))
        assert all(f"{a:,} + {b:,}" in said for a, b in about.variants.values())
        fewer = replace(source, class_names=tuple(names[1:]))
        assert f"{about.classes - 1} classes" in str(count_problem(fewer, about))


def test_the_published_counts() -> None:
    counts = {name: dict(sources.info(name).variants) for name in sources.names()}
    assert counts == {
        "cars196": {"official": (8_144, 8_041)},
        "cifar100": {"official": (50_000, 10_000)},
        "cub200": {"official": (5_994, 5_794), "pilot": (9_430, 2_358)},
        "fashion_mnist": {"official": (60_000, 10_000)},
        "imagenet_r": {"folders": (24_000, 6_000)},
        "vtab": {"pilot": (1_796, 8_619)},
    }


def test_other_counts_are_told_with_all_known_variants(make, tmp_path: Path) -> None:
    make("cub200", "raw", tmp_path)
    with pytest.warns(CofimaWarning, match=r"official 5,994 \+ 5,794, pilot 9,430 \+ 2,358"):
        assert find("cub200", tmp_path).variant == "other"


def test_a_dealt_split_is_checked_by_its_sum() -> None:
    about = sources.info("imagenet_r")
    source = about.source(([], []), [str(n) for n in range(200)], "seed0")
    source = replace(source, train=range(24_007), test=range(5_993), facts={"split": "per class, 0.2 tested"})  # type: ignore[arg-type]
    assert count_problem(source, about) is None
    assert count_problem(replace(source, facts={"split": "given"}), about)
    assert count_problem(replace(source, test=range(5_000)), about)  # type: ignore[arg-type]


def test_swapped_cars_are_recognized() -> None:
    about = sources.info("cars196")
    assert about.variant(8_041, 8_144) == "swapped"
    source = about.source(([], []), [str(n) for n in range(196)])
    swapped = replace(source, train=range(8_041), test=range(8_144))  # type: ignore[arg-type]
    assert "swapped" in str(count_problem(swapped, about))


def test_cars_with_the_flag_test_are_test_images(make, tmp_path: Path) -> None:
    make("cars196", "annos", tmp_path)
    source = find("cars196", tmp_path)
    assert [p.name for p in source.test] == sorted(
        (f"car_ims/{n:06}.jpg" for n in range(10, 16)), key=lambda name: ((int(name[8:14]) - 1) % 3, name)
    )
    assert len(source.train) == 9
    assert source.class_names[1] == "BMW X5 SUV 2007"  # numbered by the annotations, not by name
    assert {p.label for p in source.train if p.name.endswith("2.jpg")} == {1}


def test_cars_of_the_devkit_keep_files_of_one_name_apart(make, tmp_path: Path) -> None:
    make("cars196", "devkit", tmp_path)
    source = find("cars196", tmp_path)
    assert (len(source.train), len(source.test)) == (9, 6)
    assert {p.name for p in source.test} == {f"cars_test/{n:05}.jpg" for n in range(1, 7)}
    read = (tmp_path / "stanford_cars" / "cars_test" / "00001.jpg").read_bytes()
    assert next(p for p in source.test if p.name.endswith("00001.jpg")).read() == read


def test_birds_are_split_by_the_official_list(make, tmp_path: Path) -> None:
    make("cub200", "raw", tmp_path)
    source = find("cub200", tmp_path)
    assert source.class_names == ("001.Albatross", "002.Auklet", "003.Bunting")
    assert (len(source.train), len(source.test)) == (9, 6)
    for part, odd in ((source.train, 0), (source.test, 1)):
        assert {int(re.findall(r"Bird_(\d+)", picture.name)[0]) % 2 for picture in part} == {odd}
        assert all(picture.name.startswith(source.class_names[picture.label]) for picture in part)


def test_one_split_has_one_hash_in_every_layout(make, photograph, tmp_path: Path) -> None:
    make("cub200", "raw", tmp_path / "raw")
    raw = find("cub200", tmp_path / "raw")
    for part, samples in (("train", raw.train), ("val", raw.test)):
        for picture in samples:
            path = tmp_path / "folders" / "cub_200" / part / picture.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture.read())
    folders = find("cub200", tmp_path / "folders")
    assert folders.facts["layout"] == "folders"
    assert folders.facts["split_hash"] == raw.facts["split_hash"]
    assert contents(folders) == contents(raw)


@pytest.mark.parametrize(
    ("dataset", "home", "test"),
    [("cub200", "data/cub", "test"), ("cars196", "cars196", "val"), ("imagenet_r", "imagenet-r", "test")],
)
def test_folders_are_numbered_as_torchvision_does(
    dataset: str, home: str, test: str, make, tmp_path: Path
) -> None:
    make(dataset, "folders", tmp_path)
    source = find(dataset, tmp_path)
    for part, samples in (("train", source.train), (test, source.test)):
        oracle = ImageFolder(str(tmp_path / home / part))
        assert tuple(oracle.classes) == source.class_names
        found = [(Path(picture.name).name, picture.label) for picture in samples]
        assert found == [(Path(path).name, label) for path, label in oracle.samples]


def test_cifar_pixels_are_those_of_the_rows(make, tmp_path: Path) -> None:
    make("cifar100", "python", tmp_path)
    source = find("cifar100", tmp_path)
    for seed, (part, each) in enumerate(((source.train, 4), (source.test, 2))):
        data = np.random.RandomState(seed).randint(0, 256, (3 * each, 3072), np.uint8)
        for picture in part:
            row = int(picture.name.split("/")[1])
            assert picture.label == row % 3
            assert np.array_equal(picture.read(), data[row].reshape(3, 32, 32).transpose(1, 2, 0))
    assert source.class_names == ("thing 0", "thing 1", "thing 2")


def test_files_other_than_the_published_ones_are_no_official_cifar(make, tmp_path: Path, monkeypatch) -> None:
    make("cifar100", "python", tmp_path)
    assert find("cifar100", tmp_path).variant == "other"
    from hashlib import md5

    from cofima.data.sources import cifar100

    own = {k: md5((tmp_path / "cifar-100-python" / k).read_bytes()).hexdigest() for k in cifar100.MD5}
    monkeypatch.setattr(cifar100, "MD5", own)
    assert find("cifar100", tmp_path).variant == "official"


def test_the_md5_sums_are_torchvision_s() -> None:
    from torchvision.datasets import CIFAR100

    from cofima.data.sources.cifar100 import INFO, MD5

    theirs = dict([*CIFAR100.train_list, *CIFAR100.test_list, ["meta", CIFAR100.meta["md5"]]])
    assert theirs == MD5
    assert INFO.url == CIFAR100.url


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_files_are_read_as_torchvision_reads_them(compressed: bool, make, tmp_path: Path) -> None:
    make("fashion_mnist", "idx", tmp_path, compressed=compressed)
    source = find("fashion_mnist", tmp_path)
    make("fashion_mnist", "idx", tmp_path / "oracle")
    for train, part in ((True, source.train), (False, source.test)):
        oracle = FashionMNIST(str(tmp_path / "oracle"), train=train)
        assert [name.lower() for name in oracle.classes] == [name.lower() for name in source.class_names]
        assert len(oracle) == len(part)
        for picture in part:
            image, label = oracle[int(picture.name.split("/")[1])]
            assert picture.label == label
            assert np.array_equal(picture.read(), np.asarray(image.convert("RGB")))


def test_debian_s_folder_is_looked_at(make, tmp_path: Path, monkeypatch) -> None:
    make("fashion_mnist", "idx", tmp_path)
    (tmp_path / "system").mkdir()
    (tmp_path / "FashionMNIST" / "raw").rename(tmp_path / "system" / "fashion-mnist")
    monkeypatch.setattr("cofima.data.sources.base.SYSTEM", tmp_path / "system")
    monkeypatch.delenv("COFIMA_DATA", raising=False)
    monkeypatch.chdir(tmp_path / "FashionMNIST")
    assert sources.find("fashion_mnist", DataOptions()).facts["folder"].endswith("system/fashion-mnist")


def test_renditions_are_dealt_by_the_seed_per_class(make, tmp_path: Path) -> None:
    make("imagenet_r", "unsplit", tmp_path)
    one, same, other = (find("imagenet_r", tmp_path, split_seed=s) for s in (0, 0, 1))
    assert (one.facts["split_id"], other.facts["split_id"]) == ("imagenet_r:seed0", "imagenet_r:seed1")
    assert one.facts["split_hash"] == same.facts["split_hash"] != other.facts["split_hash"]
    assert Counter(p.label for p in one.test) == {0: 1, 1: 1, 2: 1}
    names = [f"n01443537/art_{n}.jpg" for n in range(5)]
    assert one.test[0].name == names[shuffled(names, 0)[0]]  # the slow definition: lowest hash first
    half = find("imagenet_r", tmp_path, test_fraction=0.4)
    assert (half.variant, len(half.test)) == ("seed0-share0.4", 6)


def test_the_archive_of_imagenet_r_is_dealt_as_the_papers_say(tmp_path: Path, monkeypatch) -> None:
    counts = [150] * 192 + [151] * 6 + [147] * 2
    rounded = sum(share_of(count, 0.2) for count in counts)
    assert (sum(counts), rounded) == (30_000, 5_998)  # class by class two are missing, as of the real archive
    names = [f"n{label:08}/art_{number}.jpg" for label, n in enumerate(counts) for number in range(n)]
    monkeypatch.setattr(imagenet_r, "_in_tar", lambda path: dict.fromkeys(names, bytes))
    (tmp_path / "imagenet-r.tar").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said of the counts
        source = find("imagenet_r", tmp_path)
    known = published().images["ImageNet-R"]  # what the paper's tables take
    assert (len(source.train), len(source.test)) in known == [(24_000, 6_000)]
    for label, tested in Counter(p.label for p in source.test).items():
        assert abs(tested - counts[label] / 5) < 1


@settings(max_examples=50)
@given(
    st.dictionaries(st.integers(0, 50), st.integers(1, 40), min_size=1),
    st.sampled_from([0.1, 0.2, 0.25, 0.4]),
)
def test_a_share_is_divided_among_classes_in_proportion(counts: dict[int, int], share: float) -> None:
    found = apportion(counts, share)
    assert all(1 <= found[c] <= n - 1 if n > 1 else found[c] == 0 for c, n in counts.items())
    if min(counts.values()) >= 10:  # no class is at its limit
        assert sum(found.values()) == round(Fraction(str(share)) * sum(counts.values()))
        assert all(abs(found[c] - share * n) < 1 + 1e-9 for c, n in counts.items())
        gives = {c: share * n - found[c] for c, n in counts.items()}  # below 0: one was given more
        least = min((share * n % 1 for c, n in counts.items() if gives[c] < -1e-9), default=1.0)
        assert all(gap <= least + 1e-6 for gap in gives.values())


def test_the_archive_is_the_folder(make, tmp_path: Path) -> None:
    make("imagenet_r", "tar", tmp_path)
    packed, unpacked = find("imagenet_r", tmp_path), find("imagenet_r", tmp_path / "unpacked")
    assert (packed.facts["layout"], unpacked.facts["layout"]) == ("tar", "unsplit")
    assert packed.facts["split_hash"] == unpacked.facts["split_hash"]
    assert contents(packed) == contents(unpacked)


def test_lists_beside_the_images_decide(make, tmp_path: Path) -> None:
    make("imagenet_r", "lists", tmp_path)
    source = find("imagenet_r", tmp_path)
    assert source.facts["split_id"] == "imagenet_r:lists"
    assert {p.name.split("_")[1] for p in source.test} == {"1.jpg", "2.jpg"}
    assert find("imagenet_r", tmp_path, layout="unsplit").variant == "seed0"


def test_vtab_keeps_the_order_of_its_datasets(make, tmp_path: Path) -> None:
    make("vtab", "folders", tmp_path)
    assert find("vtab", tmp_path).class_names == ("9", "10", "11")
    make("vtab", "nested", tmp_path / "other")
    nested = find("vtab", tmp_path / "other")
    parts = ("resisc45", "dtd", "oxford_pets")
    assert nested.class_names == tuple(f"{part}/{name}" for part in parts for name in "ab")
    assert nested.facts["class_order"] == "given"


def test_vtab_is_not_shuffled_unless_asked(make, tmp_path: Path, tiny, monkeypatch) -> None:
    from cofima.experiment import stream as streams

    make("vtab", "folders", tmp_path)
    dataset = datasets.load("vtab", 16, options=options(tmp_path))
    monkeypatch.setattr(streams.datasets, "load", lambda *_, **__: dataset)
    facts = tiny.model(tiny.config(), tiny.stream()).backbone

    def order(**stream: int) -> tuple[str, ...]:
        config = tiny.config(stream={"base_classes": 1, "increment": 1, **stream}, seed=1)
        return streams.load_stream(config, facts).class_names

    assert order() == ("9", "10", "11")
    shuffled_by_seed = split(dataset, 1, 1, 0).class_names
    assert order(order_seed=0) == shuffled_by_seed != ("9", "10", "11")


class Heard(Progress):
    """Keep what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)


def test_of_several_copies_the_choice_is_said(make, tmp_path: Path) -> None:
    make("cub200", "raw", tmp_path)
    make("cub200", "folders", tmp_path)
    heard = Heard()
    assert sources.find("cub200", options(tmp_path), heard).facts["layout"] == "raw"
    assert heard.lines == [
        f"cub200: taking raw in {tmp_path}/CUB_200_2011, not folders in {tmp_path}/data/cub "
        "(choose with data.layout or data.root)"
    ]
    heard = Heard()
    assert sources.find("cub200", options(tmp_path, layout="folders"), heard).facts["layout"] == "folders"
    assert not heard.lines
    with pytest.raises(
        CofimaError, match=r"data.layout = row: cub200 has no such layout; did you mean 'raw'"
    ):
        find("cub200", tmp_path, layout="row")
    with pytest.raises(CofimaError, match=r"There is only folders in .*/data/cub"):
        find("cub200", tmp_path / "data", layout="raw")


@pytest.mark.parametrize("name", ["CUB_200_2011", "cub", "cub-200", "cub_200", "CUB200"])
def test_a_folder_may_be_called_in_many_ways(name: str, make, tmp_path: Path, monkeypatch) -> None:
    make("cub200", "raw", tmp_path)
    (tmp_path / "CUB_200_2011").rename(tmp_path / name)
    monkeypatch.delenv("COFIMA_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert sources.copies("cub200", None)[0].path == Path(name)
    monkeypatch.chdir(tmp_path / name)
    monkeypatch.setenv("COFIMA_DATA", str(tmp_path))
    assert {copy.path.resolve() for copy in sources.copies("cub200", None)} == {tmp_path / name}
    assert sources.copies("cub200", tmp_path / name)[0].layout == "raw"  # the folder itself


def damage(path: Path, keep: float = 0.6) -> None:
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


@pytest.mark.parametrize(
    ("dataset", "layout", "file", "said"),
    [
        ("cifar100", "archive", "cifar-100-python.tar.gz", "damaged or not complete"),
        ("cifar100", "python", "cifar-100-python/train", "train: not a file of CIFAR-100"),
        ("cifar100", "python", "cifar-100-python/meta", "meta: not a file of CIFAR-100"),
        ("fashion_mnist", "idx", "FashionMNIST/raw/t10k-images-idx3-ubyte", "expected 7,840"),
        ("imagenet_r", "tar", "imagenet-r.tar", "cannot be read"),
        ("cars196", "annos", "cars196/cars_annos.mat", "damaged"),
        ("cub200", "raw", "CUB_200_2011/image_class_labels.txt", "image_class_labels.txt"),
        ("imagenet_r", "lists", "imagenet-r/imagenet-r_test.yaml", "not a split file"),
    ],
)
def test_half_a_file_is_one_error(
    dataset: str, layout: str, file: str, said: str, make, tmp_path: Path
) -> None:
    make(dataset, layout, tmp_path)
    damage(tmp_path / file)
    with pytest.raises(CofimaError, match=re.escape(said)) as caught:
        find(dataset, tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_compressed_idx_file_that_is_cut(make, tmp_path: Path) -> None:
    make("fashion_mnist", "idx", tmp_path, compressed=True)
    damage(tmp_path / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte.gz")
    damage(tmp_path / "FashionMNIST" / "raw" / "t10k-labels-idx1-ubyte.gz")
    with pytest.raises(CofimaError, match="2 problems") as caught:
        find("fashion_mnist", tmp_path)
    assert "train-labels-idx1-ubyte.gz: damaged" in str(caught.value)


def test_digits_are_not_taken_for_a_dataset_of_another_shape(make, tmp_path: Path) -> None:
    make("fashion_mnist", "idx", tmp_path)
    raw = tmp_path / "FashionMNIST" / "raw"
    (raw / "train-images-idx3-ubyte").write_bytes((raw / "train-labels-idx1-ubyte").read_bytes())
    with pytest.raises(CofimaError, match=r"starts with 0x801, not 0x803"):
        find("fashion_mnist", tmp_path)


@pytest.mark.parametrize(
    ("dataset", "layout", "gone", "said"),
    [
        ("cub200", "folders", "data/cub/test/002.Auklet/*", "class '002.Auklet': no test images"),
        ("cub200", "raw", "CUB_200_2011/images/001.Albatross/*", "no such file"),
        ("cars196", "devkit", "stanford_cars/cars_test/00001.jpg", "cars_test/00001.jpg: no such file"),
        ("imagenet_r", "lists", "imagenet-r/n01443537/art_1.jpg", "there is no such image"),
        ("vtab", "nested", "vtab/dtd/train/a/*", "class 'dtd/a': no training images"),
    ],
)
def test_missing_images_are_one_error(
    dataset: str, layout: str, gone: str, said: str, make, tmp_path: Path
) -> None:
    make(dataset, layout, tmp_path)
    for path in tmp_path.glob(gone):
        path.unlink()
    with pytest.raises(CofimaError, match=re.escape(said)):
        find(dataset, tmp_path)


@pytest.mark.parametrize(
    ("dataset", "layout"),
    [("cub200", "raw"), ("cub200", "folders"), ("cars196", "annos"), ("imagenet_r", "unsplit")],
)
def test_every_damaged_image_is_named_at_once(dataset: str, layout: str, make, tmp_path: Path) -> None:
    make(dataset, layout, tmp_path)
    source = find(dataset, tmp_path)
    bad = sorted(tmp_path.rglob("*.jpg"))[:2]
    bad[0].write_bytes(b"")
    damage(bad[1])
    for read in (
        lambda: datasets.load(dataset, 8, options=options(tmp_path)),
        lambda: pytest.fail("\n".join(verify(source).faults)),
    ):
        with pytest.raises((CofimaError, pytest.fail.Exception)) as caught:
            read()
        assert all(path.name in str(caught.value) for path in bad)
        assert "empty file" in str(caught.value)


def test_a_test_image_that_is_trained_on_is_found_by_its_content(make, tmp_path: Path) -> None:
    make("cub200", "folders", tmp_path)
    source = find("cub200", tmp_path)
    home = tmp_path / "data" / "cub"
    copy = next((home / "test" / "003.Bunting").iterdir())
    copy.write_bytes(next((home / "train" / "001.Albatross").iterdir()).read_bytes())
    assert verify(source).shared == [f"003.Bunting/{copy.name}"]


def test_files_of_one_name_in_both_parts_are_told_apart(photograph, tmp_path: Path) -> None:
    for seed, part in enumerate(("train", "test")):
        for label, bird in enumerate("ab"):
            path = tmp_path / "cub" / part / bird / "1.jpg"
            path.parent.mkdir(parents=True)
            path.write_bytes(photograph(10 * seed + label))
    source = find("cub200", tmp_path)
    assert [p.name for p in source.train] == ["train/a/1.jpg", "train/b/1.jpg"]
    assert [p.name for p in source.test] == ["test/a/1.jpg", "test/b/1.jpg"]


def test_listing_reads_no_image(dataset: str, layout: str, make, tmp_path: Path, monkeypatch) -> None:
    make(dataset, layout, tmp_path)
    read: list[Path] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read.append(self) or whole(self))
    find(dataset, tmp_path)
    assert not [path for path in read if path.suffix == ".jpg"]


def test_the_image_is_the_one_of_its_name(make, tmp_path: Path) -> None:
    make("imagenet_r", "tar", tmp_path)
    picture = find("imagenet_r", tmp_path).train[0]
    content = (tmp_path / "unpacked" / "imagenet-r" / picture.name).read_bytes()
    assert picture.read() == content
    Image.open(tmp_path / "unpacked" / "imagenet-r" / picture.name).load()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize("target", ["cifar-100-python/meta", "/etc/passwd", "nowhere"])
def test_cifar_in_an_archive_is_files_and_not_links(kind: bytes, target: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz") as tar:
        for name in ("train", "test", "meta"):
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.type, member.linkname = kind, target
            tar.addfile(member)
    with pytest.raises(CofimaError, match="is not a file of CIFAR-100"):
        find("cifar100", tmp_path)


def test_a_member_that_claims_more_than_cifar_has_is_not_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("cifar-100-python/train")
        member.size = 10**12
        tar.fileobj.write(member.tobuf())  # type: ignore[union-attr]
    with pytest.raises(CofimaError, match=r"is not a file of CIFAR-100|damaged"):
        find("cifar100", tmp_path)
