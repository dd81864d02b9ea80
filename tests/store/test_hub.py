"""Hub models: the pushed model at the requested commit, never changed in place."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cofima
from cofima.classifier.export.hub import push
from cofima.cli.main import app
from cofima.core.errors import CofimaError
from cofima.store import hub as module
from cofima.store import model_folder
from cofima.store.model import load_model
from cofima.store.record import BACKBONE, HEAD, STATE
from fake_hub import Hub, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    where = tmp_path_factory.mktemp("hub") / "parts"
    tiny.run(where, tiny.config("cofima", train={"epochs": 1}), tiny.stream((2, 1), per_class=6))
    return where


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving(monkeypatch, tmp_path / "cache") as server:
        yield server


def test_what_was_pushed_is_loaded_and_its_commit_is_said(
    folder: Path, hub: Hub, tmp_path: Path, same_bits: Any
) -> None:
    push(folder, "me/parts")
    hub.files["pytorch_model.bin"] = hub.files["0003/extra.py"] = b"import os"
    found = cofima.load("hf://me/parts")
    assert found.origin == f"hf://me/parts@{hub.commit()}"
    assert found.classes == load_model(folder).classes
    same_bits(found.model.weights(), load_model(folder).weights())
    fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    backbone = model_folder.read(folder).place(BACKBONE).name
    assert fetched == {"CURRENT", backbone, "config.json", "history.jsonl", HEAD, STATE}
    with pytest.raises(CofimaError, match="give a folder"):
        found.save()
    found.rename(found.classes[0], "other")
    found.save(tmp_path / "own")
    assert cofima.load(tmp_path / "own").classes[0] == "other"


def test_a_commit_is_the_same_model_for_ever(folder: Path, hub: Hub, tmp_path: Path) -> None:
    push(folder, "me/parts")
    first = hub.commit()
    hub.files = {"README.md": b"gone"}
    assert hub.commit() != first
    assert cofima.load(f"hf://me/parts@{first}").origin == f"hf://me/parts@{first}"
    with pytest.raises(CofimaError, match=r"hf://me/parts@.* is no model of cofima: it has no file CURRENT"):
        cofima.load("hf://me/parts")
    with pytest.raises(CofimaError, match="no such branch, tag or commit"):
        cofima.load("hf://me/parts@v9")
    with pytest.raises(CofimaError, match="no such repository, or it is private"):
        cofima.load("hf://me/others")
    for wrong in ("hf://", "hf://a/b/c", "hf://me/../parts", "hf://me/parts@../x", "hf:///etc/passwd"):
        with pytest.raises(CofimaError, match="is no address"):
            cofima.load(wrong)


def test_a_file_that_was_changed_on_the_hub_is_refused(folder: Path, hub: Hub) -> None:
    push(folder, "me/parts")
    generation = model_folder.read(folder)
    for name in (HEAD, BACKBONE):
        weights = generation.place(name).relative_to(folder).as_posix()
        whole = hub.files[weights]
        hub.files[weights] = whole[:-1] + bytes([whole[-1] ^ 1])
        with pytest.raises(CofimaError, match="sha256 differs"):
            cofima.load("hf://me/parts")
        hub.files[weights] = whole


def test_without_the_hub_the_cache_answers_or_an_error_within_seconds(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(folder, "me/parts")
    origin = cofima.load("hf://me/parts").origin
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert cofima.load("hf://me/parts").origin == origin
    start = time.monotonic()
    with pytest.raises(CofimaError, match="the hub cannot be reached, and the model is not on this machine"):
        cofima.load("hf://me/others")
    assert time.monotonic() - start < 5


def test_commands_read_models_of_the_hub_and_change_none(folder: Path, hub: Hub, tmp_path: Path) -> None:
    push(folder, "me/parts")
    address = f"hf://me/parts@{hub.commit()}"

    def say(*words: object) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        return done.output

    assert address in say("history", "hf://me/parts")
    assert "\n# parts\n" in say("card", address)
    for words in (["undo", address], ["rename", address, "a", "b"], ["remove-class", address, "a"]):
        with pytest.raises(CofimaError, match="is on the hub and cannot be changed there"):
            say(*words)
    with pytest.raises(CofimaError, match="cannot be changed there: give a folder with --out"):
        say("extend", address, tmp_path)
    say("merge", address, folder, "-o", tmp_path / "merged")
    assert load_model(tmp_path / "merged").classes == load_model(folder).classes
    assert not [path for path in (tmp_path / "cache").rglob(".lock*") if "snapshots" in path.parts]


def test_only_the_client_s_own_folders_are_snapshots(tmp_path: Path) -> None:
    assert module.is_snapshot(tmp_path / "models--me--parts" / "snapshots" / "0123")
    assert not module.is_snapshot(tmp_path / "snapshots" / "0123")
    assert not module.is_address(tmp_path)
