"""Output of ``cofima data`` and ``cofima list datasets``."""

import warnings
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cofima.cli.main import app
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.data.sources.split_file import read_manifest


def cofima(*words: str) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CofimaWarning)
        done = CliRunner().invoke(app, list(words), env={"COLUMNS": "400"})
    if isinstance(done.exception, CofimaError):
        raise done.exception
    return done


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COFIMA_DATA", str(tmp_path / "shared"))
    monkeypatch.setenv("COFIMA_CACHE", str(tmp_path / "cache"))


def test_check_says_what_is_expected_and_found(make, tmp_path: Path) -> None:
    make("cub200", "raw", tmp_path / "shared")
    said = cofima("data", "check", "cub200").stdout
    assert "official: 5,994 training + 5,794 test images, 200 classes" in said
    assert f"9 training + 6 test images, 3 classes in {tmp_path}/shared/CUB_200_2011 (raw)" in said
    assert "split     cub200:other (sha256 " in said
    assert "all 15 can be read" in said
    assert "problems  1" in said  # the counts
    assert "can be read" not in cofima("data", "check", "cub200", "--quick").stdout


def test_check_names_every_damaged_image(make, tmp_path: Path) -> None:
    make("cub200", "raw", tmp_path)
    bad = sorted(tmp_path.rglob("*.jpg"))[3]
    bad.write_bytes(b"no image")
    with pytest.raises(CofimaError, match=rf"1 problem:\n  001.Albatross/{bad.name}: not an image"):
        cofima("data", "check", "cub200")


def test_check_takes_options_and_refuses_wrong_ones(make, tmp_path: Path) -> None:
    make("imagenet_r", "unsplit", tmp_path / "else")
    assert (
        "imagenet_r:seed4"
        in cofima("data", "check", "imagenet_r", "data.root=else", "data.split_seed=4").stdout
    )
    with pytest.raises(CofimaError, match=r"data.rot.*did you mean 'data.root'"):
        cofima("data", "check", "imagenet_r", "data.rot=else")
    with pytest.raises(CofimaError, match="did you mean 'cub200'"):
        cofima("data", "check", "cub20")


@pytest.mark.filterwarnings("ignore:.*known for:cofima.core.errors.CofimaWarning")
def test_copies_of_training_images_are_a_problem(make, tmp_path: Path) -> None:
    make("cub200", "folders", tmp_path)
    home = tmp_path / "data" / "cub"
    copy = next((home / "test" / "003.Bunting").iterdir())
    copy.write_bytes(next((home / "train" / "001.Albatross").iterdir()).read_bytes())
    with pytest.warns(CofimaWarning, match=f"copies of training images: 003.Bunting/{copy.name}"):
        done = CliRunner().invoke(app, ["data", "check", "cub200"])
    assert "problems  2" in done.stdout


def test_prepare_writes_a_manifest_that_another_run_takes(make, tmp_path: Path) -> None:
    make("imagenet_r", "unsplit", tmp_path)
    said = cofima("data", "prepare", "imagenet_r", "data.split_seed=5").stdout
    path = tmp_path / "cache" / "splits" / "imagenet_r-seed5.jsonl"
    assert f"manifest  {path}" in said
    head, rows = read_manifest(path)
    assert len(rows) == head["train"] + head["test"] == 15
    again = cofima("data", "check", "imagenet_r", f"data.split_file={path}", "--quick").stdout
    assert head["split_hash"] in again
    assert "--out" in cofima("data", "prepare", "--help").stdout


def test_the_list_says_what_is_found_and_where(make, tmp_path: Path) -> None:
    make("cub200", "raw", tmp_path / "shared")
    lines = {line.split()[0]: line for line in cofima("list", "datasets").stdout.splitlines() if line.strip()}
    assert f"raw in {tmp_path}/shared/CUB_200_2011" in lines["cub200"] or "shared" in lines["cub200"]
    assert lines["cifar100"].rstrip().endswith(" no")
    assert {"digits", "folder:PATH", "hf:NAME", "torchvision:CLASS"} <= lines.keys()


def test_a_run_on_a_dataset_that_is_not_here_ends_before_any_work(tmp_path: Path, tiny) -> None:
    from cofima.experiment.launch import launch

    with pytest.raises(CofimaError, match=r"dataset cub200 \(CUB-200-2011\) was not found"):
        launch(tiny.config(dataset="cub200"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_root_is_where_datasets_are_looked_for(make, tmp_path: Path) -> None:
    make("cub200", "raw", tmp_path / "else")
    with pytest.raises(CofimaError, match="--data-root or COFIMA_DATA"):
        cofima("data", "check", "cub200")
    assert str(tmp_path / "else") in cofima("data", "check", "cub200", "--data-root", "else").stdout
    with pytest.raises(CofimaError, match=r"nowhere \(no such folder\)"):
        cofima("data", "check", "cub200", "--data-root", "nowhere")
