"""``cofima data get``: a public dataset, checked, in a layout that is read; all of it or nothing."""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cofima.cli.main import app
from cofima.core.errors import CofimaError
from cofima.data import download, obtain, sources
from cofima.data.obtain import Obtained
from cofima.data.sources.base import Download
from web import Web, serving

pytestmark = pytest.mark.filterwarnings("ignore:.*known for:cofima.core.errors.CofimaWarning")


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with serving() as server:
        yield server


def packed(folder: Path, name: str, *tops: str) -> bytes:
    """Return an archive of files and folders in a folder, under their own names."""
    file = io.BytesIO()
    paths = [path for top in tops for path in [folder / top, *(folder / top).rglob("*")] if path.is_file()]
    if name.endswith(".zip"):
        with zipfile.ZipFile(file, "w") as zipped:
            for path in paths:
                zipped.write(path, path.relative_to(folder))
    else:
        with tarfile.open(fileobj=file, mode="w" if name.endswith(".tar") else "w:gz") as tar:
            for path in paths:
                tar.add(path, str(path.relative_to(folder)))
    return file.getvalue()


# how each dataset is published: a layout, where its files lie, and what is packed into which file
PUBLISHED: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "cifar100": ("python", ".", {"cifar-100-python.tar.gz": ("cifar-100-python",)}),
    "cub200": ("raw", ".", {"CUB_200_2011.tgz": ("CUB_200_2011", "attributes.txt")}),
    "imagenet_r": ("unsplit", ".", {"imagenet-r.tar": ("imagenet-r",)}),
    "cars196": (
        "devkit",
        "stanford_cars",
        {
            "car_devkit.tgz": ("devkit",),
            "cars_train.tgz": ("cars_train",),
            "cars_test.tgz": ("cars_test",),
            "cars_test_annos_withlabels.mat": ("cars_test_annos_withlabels.mat",),
        },
    ),
    "vtab": ("folders", "vtab-cil", {"vtab.zip": ("vtab",)}),
    "fashion_mnist": (
        "idx",
        "FashionMNIST/raw",
        {
            f"{stem}-{kind}-ubyte.gz": (f"{stem}-{kind}-ubyte.gz",)
            for stem in ("train", "t10k")
            for kind in ("images-idx3", "labels-idx1")
        },
    ),
}


@pytest.fixture
def publish(web: Web, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that puts a small copy of a dataset on the web, as its authors pack the real one."""

    def put(name: str, digests: bool = True) -> Download:
        layout, inside, archives = PUBLISHED[name]
        more = {"compressed": True} if name == "fashion_mnist" else {}
        make(name, layout, tmp_path / "made", **more)
        (tmp_path / "made" / "attributes.txt").write_text("beside the folder, as in CUB's archive")
        contents = {
            file: (tmp_path / "made" / inside / tops[0]).read_bytes()
            if tops == (file,)
            else packed(tmp_path / "made" / inside, file, *tops)
            for file, tops in archives.items()
        }
        web.files = {f"/{name}/{file}": content for file, content in contents.items()}
        module = sources._module(name)
        plan = module.INFO.download
        files = tuple(
            replace(
                file,
                url=file.url and f"{web.address}/{name}/{file.name}",
                digest=f"sha256:{hashlib.sha256(contents[file.name]).hexdigest()}" if digests else "",
                size=len(contents[file.name]) if file.size else None,
            )
            for file in plan.files
        )
        monkeypatch.setattr(module, "INFO", replace(module.INFO, download=replace(plan, files=files)))
        return module.INFO.download  # type: ignore[no-any-return]

    return put


def get(name: str, root: Path, **how: Any) -> Obtained:
    return obtain.obtain(name, root, **how)


def left(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} if root.exists() else set()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dataset_is_fetched_verified_and_read(
    name: str, publish: Any, web: Web, make: Any, tmp_path: Path
) -> None:
    plan, root = publish(name), tmp_path / "data"
    done = get(name, root, place=f"{web.address}/{name}", accept_license=True)
    assert left(root) == {plan.target}
    assert done.files.keys() == {file.name for file in plan.files}
    assert all(text.startswith("sha256 ") for text in done.files.values())
    make(name, PUBLISHED[name][0], tmp_path / "own")
    own = sources.find(name, obtain.DataOptions(root=tmp_path / "own"))
    assert done.source.facts["split_hash"] == own.facts["split_hash"]
    asked = len(web.asked)
    again = get(name, root)
    assert again.files == {}
    assert again.source.facts["split_hash"] == own.facts["split_hash"]
    assert len(web.asked) == asked


def test_every_published_dataset_is_tried() -> None:
    assert set(PUBLISHED) == set(obtain.names())


def test_a_digest_has_a_source_and_an_address_is_of_the_web() -> None:
    for name in obtain.names():
        plan = sources.info(name).download
        assert plan is not None
        for file in plan.files:
            kind, _, digits = file.digest.partition(":")
            assert len(digits) == {"md5": 32, "sha256": 64, "": 0}[kind], file
            assert bool(file.digest or file.size) == bool(file.cited), file
            assert file.url.startswith(("https://", "http://")) or plan.by_hand, file


def test_wrong_bytes_are_removed_and_nothing_has_the_name(publish: Any, web: Web, tmp_path: Path) -> None:
    publish("cifar100")
    path = "/cifar100/cifar-100-python.tar.gz"
    good = web.files[path]
    web.files[path] = good[:-1] + b"x"
    with pytest.raises(CofimaError, match=r"its sha256 is .* says .*; it was removed, and the same command"):
        get("cifar100", tmp_path / "data")
    assert left(tmp_path / "data") <= {"downloads"}
    web.files[path] = good
    get("cifar100", tmp_path / "data")
    assert left(tmp_path / "data") == {"cifar-100-python"}


def test_an_interrupted_download_goes_on(publish: Any, web: Web, tmp_path: Path) -> None:
    publish("cifar100")
    web.break_after = [1000] + [0] * download.TRIES
    with pytest.raises(CofimaError, match="the same command goes on"):
        get("cifar100", tmp_path / "data")
    web.asked.clear()
    get("cifar100", tmp_path / "data")
    assert web.asked == [("/cifar100/cifar-100-python.tar.gz", "bytes=1000-")]
    assert left(tmp_path / "data") == {"cifar-100-python"}


def test_what_was_downloaded_but_not_unpacked_is_not_fetched_again(
    publish: Any, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("cifar100")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(obtain, "unpack", killed)
        with pytest.raises(KeyboardInterrupt):
            get("cifar100", tmp_path / "data")
    assert left(tmp_path / "data") == {"downloads"}
    stale = tmp_path / "data" / "downloads" / "cifar100" / "unpacked" / "cifar-100-python" / "train"
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.write_bytes(b"half")
    get("cifar100", tmp_path / "data")
    assert len(web.asked) == 1
    assert left(tmp_path / "data") == {"cifar-100-python"}


def test_without_a_digest_the_counts_decide(
    publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("cifar100", digests=False)
    with pytest.raises(
        CofimaError, match=r"as it was fetched has 3 classes.*known for CIFAR-100: 100 classes"
    ):
        get("cifar100", tmp_path / "data")
    assert left(tmp_path / "data") == {"downloads"}
    module = sources._module("cifar100")
    few = replace(module.INFO, classes=3, variants={"official": (12, 6)})
    monkeypatch.setattr(module, "INFO", few)
    done = get("cifar100", tmp_path / "data")
    assert done.files == {"cifar-100-python.tar.gz": "unverified: no digest of it is published"}


def test_files_that_a_person_fetched_are_checked_too_and_stay(publish: Any, web: Web, tmp_path: Path) -> None:
    publish("cifar100")
    hand = tmp_path / "hand"
    hand.mkdir()
    with pytest.raises(CofimaError, match=r"no such file; --from needs cifar-100-python.tar.gz"):
        get("cifar100", tmp_path / "data", place=str(hand))
    archive = hand / "cifar-100-python.tar.gz"
    archive.write_bytes(b"another file")
    with pytest.raises(CofimaError, match="is not the published file"):
        get("cifar100", tmp_path / "data", place=str(hand))
    archive.write_bytes(web.files["/cifar100/cifar-100-python.tar.gz"])
    get("cifar100", tmp_path / "data", place=str(hand))
    assert archive.exists()
    assert not web.asked
    assert left(tmp_path / "data") == {"cifar-100-python"}


def test_what_is_in_the_way_is_named_before_anything_is_fetched(
    publish: Any, web: Web, tmp_path: Path
) -> None:
    publish("cifar100")
    (tmp_path / "data" / "cifar-100-python").mkdir(parents=True)
    with pytest.raises(CofimaError, match=r"cifar-100-python is there, and is no copy of cifar100: move it"):
        get("cifar100", tmp_path / "data")
    assert not web.asked


def test_terms_are_accepted_before_anything_is_fetched(
    publish: Any, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = publish("cifar100")
    module = sources._module("cifar100")
    terms = replace(plan, terms="its authors ask for a promise (the page)")
    monkeypatch.setattr(module, "INFO", replace(module.INFO, download=terms))
    with pytest.raises(
        CofimaError, match=r"ask for a promise \(the page\); accept this with --accept-license"
    ):
        get("cifar100", tmp_path / "data")
    assert not web.asked
    get("cifar100", tmp_path / "data", accept_license=True)


@pytest.mark.parametrize("name", ["cars196", "vtab"])
def test_what_no_program_can_fetch_says_what_a_person_can_do(
    name: str, publish: Any, web: Web, tmp_path: Path
) -> None:
    plan = publish(name)
    with pytest.raises(CofimaError) as said:
        get(name, tmp_path / "data", accept_license=True)
    assert f"{name} has to be fetched by hand: {plan.by_hand}; put {plan.files[0].name}" in str(said.value)
    assert f"cofima data get {name} --from FOLDER" in str(said.value)
    assert not web.asked


def test_the_list_says_which_can_be_fetched() -> None:
    lines = CliRunner().invoke(app, ["list", "datasets"], env={"COLUMNS": "400"}).output.splitlines()
    said = {line.split()[0]: line for line in lines if line.strip()}
    assert "downloads it" in said["cub200"]
    assert "by hand" in said["vtab"]
    assert "by hand" not in said["digits"]


def test_a_name_that_cannot_be_fetched_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match="did you mean 'cifar100'"):
        get("cifar10", tmp_path)
    with pytest.raises(CofimaError, match="digits is no dataset that can be fetched"):
        get("digits", tmp_path)


def test_the_command_says_what_it_verified_and_found(
    publish: Any, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("cifar100")
    monkeypatch.delenv("COFIMA_DATA", raising=False)
    done = CliRunner().invoke(app, ["data", "get", "cifar100"])
    assert str(done.exception) == "no folder for datasets: give --data-root FOLDER, or set COFIMA_DATA"
    monkeypatch.setenv("COFIMA_DATA", str(tmp_path / "data"))
    words = ["data", "get", "cifar100"]
    said = CliRunner().invoke(app, words, env={"COLUMNS": "400"}, catch_exceptions=False).output
    assert "file      cifar-100-python.tar.gz: sha256 " in said
    assert f"12 training + 6 test images, 3 classes in {tmp_path}/data/cifar-100-python (python)" in said
    assert "split     cifar100:other (sha256 " in said
    said = CliRunner().invoke(app, words, env={"COLUMNS": "400"}, catch_exceptions=False).output
    assert "nothing was downloaded: it was there" in said
