"""Model cards are complete, and uploads to the hub succeed or are refused with a clear message."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

import cofima
from cofima.classifier.export.card import model_card
from cofima.classifier.export.hub import push
from cofima.core.errors import CofimaError
from cofima.data.image_set import image_set
from cofima.store import model_folder
from cofima.store.generation import shared_name
from cofima.store.held_out import HeldOut
from cofima.store.history import HistoryRow
from cofima.store.model import load_model, save_model
from cofima.store.record import BACKBONE, FEATURES
from fake_hub import Hub, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    where = tmp_path_factory.mktemp("card") / "parts"
    tiny.run(where, tiny.config("cofima", train={"epochs": 1}), tiny.stream((2, 1), per_class=6))
    return where


def test_the_card_has_all_that_others_must_know(folder: Path) -> None:
    model = load_model(folder)
    text = model_card(model, "parts")
    for said in (
        *model.classes,
        model.backbone.sha256,
        model.data["fingerprint"],
        model.method.paper,
        "cofima run config.yaml",
        "Intended use and limits",
        "license of these weights: unknown",
    ):
        assert said in text
    assert text.count("cofima run") == 1  # one command for all tasks
    last = model.history[-1]
    right = sum(a * n for a, n in zip(last.accuracy, last.sizes, strict=True)) / sum(last.sizes)
    assert f"{right:.1f} % of {sum(last.sizes)} images" in text


def test_the_hub_s_own_library_reads_the_front_matter(folder: Path) -> None:
    model = load_model(folder)
    said = ModelCard(model_card(model, "parts", "mit")).data
    assert (said.license, said.library_name, said.pipeline_tag) == ("mit", "cofima", "image-classification")
    (result,) = said.eval_results
    assert result.metric_type == "accuracy"
    assert 0 <= result.metric_value <= 1
    unknown = ModelCard(model_card(model, "parts")).data
    assert (unknown.license, unknown.license_name) == ("other", "unknown")


def test_an_accuracy_of_some_classes_is_no_accuracy_of_the_model(folder: Path) -> None:
    model = load_model(folder)
    one, two, three = model.classes
    model.serving["accuracy"] = {"right": {one: 3, two: 1}, "images": {one: 4, two: 2}}
    model.history[-1].kind = "extend"
    text = model_card(model, "parts")
    assert "Not measured: there were no images of all 3 classes when it last learned." in text
    assert "Of 2 of its 3 classes" in text
    assert f"| {one} | 4 | 75.0 % |" in text
    assert ModelCard(text).data.eval_results is None
    model.serving["accuracy"]["right"][three] = model.serving["accuracy"]["images"][three] = 2
    text = model_card(model, "parts")
    assert "75.0 % of 8 images of all classes, held out, and nothing was decided by them." in text
    model.serving["left_out"] = 6
    assert "6 of them each judged by all others, 2 held out." in model_card(model, "parts")
    model.serving["left_out"] = 8
    assert "75.0 % of 8 images of all classes, each judged by all others." in model_card(model, "parts")
    (result,) = ModelCard(text).data.eval_results
    assert result.metric_value == 0.75
    assert "8 images of all classes" in result.metric_name


def test_to_repeat_it_are_the_commands_that_were_given(folder: Path) -> None:
    model = load_model(folder)
    learned = "cofima learn photos -o MODEL --backbone vit_micro --epochs 2 train.lr=0.1"
    model.history = [
        HistoryRow(kind="learn", task=1, classes=["a", "b"], command=learned),
        HistoryRow(kind="more images", task=1, classes=["a"], command="cofima extend MODEL more --epochs 3"),
        HistoryRow(kind="extend", task=2, classes=["c"], command="cofima extend MODEL more --epochs 3"),
    ]
    text = model_card(model, "parts")
    assert f"{learned}\ncofima extend MODEL more --epochs 3\n```" in text


def test_no_place_on_a_disk_and_no_markup_gets_into_the_card(folder: Path) -> None:
    model = load_model(folder)
    model.data |= {"name": "/home/somebody/secret/photos", "folder": "/home/somebody/secret/photos"}
    model.config = model.config.model_copy(update={"dataset": "folder:/home/somebody/secret/photos"})
    model.tasks[0] = ("<script>", "a|b")
    text = model_card(model, "parts")
    assert "somebody" not in text
    assert "<script>" not in text
    assert "a\\|b" in text


def test_a_model_that_was_learned_says_its_commands(folder: Path) -> None:
    model = load_model(folder)
    model.history = [
        HistoryRow(kind="learn", task=1, classes=["a", "b"], train_images=9, date="2026-01-02"),
        HistoryRow(kind="extend", task=2, classes=["c"], train_images=4, accuracy=[None, 50.0], sizes=[0, 2]),
        HistoryRow(kind="rename", task=2, classes=["c", "the d"]),
    ]
    text = model_card(model, "parts")
    assert "cofima learn" in text
    assert "| 2 | extend | 1: c | 4 | 50.0\\* |" in text
    assert "- learned: 13\n- held out: 0\n" in text  # by both
    assert "cofima extend MODEL PHOTOS  # c" in text
    assert "cofima rename MODEL c 'the d'" in text
    model.history = [HistoryRow(kind="merge", task=1, classes=["a"]), *model.history[1:2]]
    text = model_card(model, "parts")
    assert "cofima merge MODELS -o MODEL\ncofima extend MODEL PHOTOS  # c\n" in text
    assert "cofima run" not in text


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving(monkeypatch, tmp_path / "hub") as server:
        yield server


def test_what_was_uploaded_is_a_model_folder_with_its_card(folder: Path, hub: Hub, tmp_path: Path) -> None:
    push(folder, "me/parts", private=True)
    assert hub.tokens == {"Bearer hf_test"}
    assert hub.repo["name"] == "parts"
    assert hub.repo.get("visibility", "") == "private" or hub.repo.get("private") is True
    for name, content in hub.files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    assert "README.md" in hub.files
    assert cofima.load(tmp_path).classes == load_model(folder).classes


def test_where_folders_lie_on_this_machine_is_not_uploaded(folder: Path, hub: Hub, tmp_path: Path) -> None:
    private = tmp_path / "private"
    model = load_model(folder)
    model.config = model.config.model_copy(update={"dataset": f"folder:{private}/photos"})
    model.data["name"] = f"{private}/photos"
    model.history[-1].notes = [f"of {private}/check"]
    save_model(model, folder)
    push(folder, "me/parts")
    assert not [name for name, content in hub.files.items() if b"private" in content]
    for name, content in hub.files.items():
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    there = load_model(tmp_path / "there")
    assert there.config.dataset == "folder:photos"
    assert there.history[-1].notes == ["of check"]


def test_a_state_that_is_no_longer_in_force_is_removed_there(folder: Path, hub: Hub) -> None:
    old = {"0001/config.json", shared_name("0" * 64)}
    hub.files = dict.fromkeys(old, b"{}") | {"notes.txt": b"mine"}
    push(folder, "me/parts")
    assert not old & hub.files.keys()
    assert model_folder.read(folder).place(BACKBONE).name in hub.files
    assert "notes.txt" in hub.files


def test_a_refusal_of_the_hub_is_one_message(folder: Path, hub: Hub) -> None:
    hub.refuse = 403
    with pytest.raises(CofimaError, match="the hub refused the upload to me/parts"):
        push(folder, "me/parts")


def test_offline_no_token_bad_name_and_no_network_are_said(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(CofimaError, match="is no name for the hub"):
        push(folder, "me/parts/again")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CofimaError, match="HF_HUB_OFFLINE is set"):
        push(folder, "me/parts")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("cofima.classifier.export.hub.get_token", lambda: None)
    with pytest.raises(CofimaError, match="no token"):
        push(folder, "me/parts")
    monkeypatch.setattr("cofima.classifier.export.hub.get_token", lambda: "hf_test")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CofimaError, match="cannot be reached"):
        push(folder, "me/parts")
    assert not hub.files


def test_features_of_images_are_uploaded_only_if_that_is_said(folder: Path, hub: Hub, tmp_path: Path) -> None:
    model = load_model(folder)
    yes = torch.ones(4).bool()
    model.held_out = HeldOut(torch.ones(4, model.width), torch.tensor([0, 0, 1, 2]), ~yes, ~yes, yes)
    model.history[-1].kept_features = 4
    save_model(model, tmp_path / "held")
    for asked in (False, True):
        push(tmp_path / "held", "me/parts", with_features=asked)
        assert any(name.endswith(FEATURES) for name in hub.files) == asked
        for name, content in hub.files.items():
            path = tmp_path / f"there {asked}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        there = load_model(tmp_path / f"there {asked}")
        assert len(there.kept) == there.history[-1].kept_features == (4 if asked else 0)


def test_images_in_a_model_are_uploaded_only_if_that_is_said(
    folder: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder)
    model.images = image_set(torch.zeros(2, 3, 16, 16, dtype=torch.uint8), torch.tensor([0, 1]))
    save_model(model, tmp_path / "held")
    with pytest.raises(CofimaError, match=r"holds images \(2\).*--with-images"):
        push(tmp_path / "held", "me/parts")
    assert not hub.files
    push(tmp_path / "held", "me/parts", with_images=True)
    assert any(name.endswith("images.safetensors") for name in hub.files)
