"""The model folder: never partially written, damage is always detected, readable by plain timm."""

import json
import pickletools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from cofima.core.errors import CofimaError
from cofima.core.lock import NAME
from cofima.core.progress import Progress
from cofima.experiment.launch import launch
from cofima.experiment.metrics_log import METRICS
from cofima.store import model_folder
from cofima.store.generation import CURRENT, SHARED, shared_name
from cofima.store.model import load_model, save_model
from cofima.store.record import BACKBONE, CONFIG, FORMAT, HEAD, HISTORY, STATE


@pytest.fixture(scope="module")
def config(tiny):
    return tiny.config("coma", train={"epochs": 1}, options={"align": {"epochs": 1, "samples_per_class": 4}})


@pytest.fixture(scope="module")
def learned(config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned") / "model"
    launch(config, folder)
    return folder


@pytest.fixture
def folder(learned: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished model that a test may damage."""
    return Path(shutil.copytree(learned, tmp_path / "model"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def names(folder: Path) -> list[str]:
    """Return the names in a folder, but for the hash in that of a backbone."""
    return sorted(SHARED.sub(BACKBONE, path.name) for path in folder.iterdir())


def pixels(count: int = 7) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=g)


def say(folder: Path) -> str:
    with pytest.raises(CofimaError) as caught:
        load_model(folder)
    return str(caught.value)


# --- what a folder looks like ----------------------------------------------------------------------


def test_one_generation_a_task_and_the_last_two_are_kept(learned: Path) -> None:
    assert (learned / CURRENT).read_text() == "0003\n"
    assert names(learned) == [NAME, "0002", "0003", CURRENT, BACKBONE, BACKBONE, METRICS]
    assert {p.name for p in (learned / "0003").iterdir()} == {HEAD, STATE, HISTORY, CONFIG}
    assert len((learned / "0003" / HISTORY).read_text().splitlines()) == 3
    assert len((learned / "0002" / HISTORY).read_text().splitlines()) == 2


def test_every_generation_is_kept_when_asked_for(tiny, tmp_path: Path) -> None:
    kept = tiny.config(
        "seq_ft", train={"epochs": 0}, keep_checkpoints=True, stream={"base_classes": 1, "increment": 1}
    )
    launch(kept, tmp_path / "model")
    kept_all = [NAME, *(f"{n:04d}" for n in range(1, 7)), CURRENT, BACKBONE, METRICS]
    assert names(tmp_path / "model") == kept_all  # nothing was trained: they share one backbone


def test_nothing_in_the_folder_is_a_pickle(learned: Path) -> None:
    for path in learned.rglob("*"):
        if path.is_file():
            assert path.suffix in (".json", ".jsonl", ".safetensors", "")
            with pytest.raises(Exception, match=r".*"):
                for _ in pickletools.genops(path.read_bytes()):
                    pass


def test_the_history_tells_of_every_task(learned: Path) -> None:
    rows = [json.loads(line) for line in (learned / "0003" / HISTORY).read_text().splitlines()]
    assert [row["task"] for row in rows] == [1, 2, 3]
    assert [len(row["accuracy"]) for row in rows] == [1, 2, 3]
    assert [row["lam"] for row in rows] == [None, 0.4, 0.4]
    for row in rows[1:]:  # the average moves by its share of what training moved
        assert row["distance"]["merged"] == pytest.approx(0.4 * row["distance"]["trained"], rel=1e-4)


def test_the_folder_says_what_it_is(learned: Path, config) -> None:
    said = json.loads((learned / "0003" / CONFIG).read_text())
    assert said["format"] == FORMAT
    assert said["method"] == {"label": "CoMA", "all_at_once": False, "keeps_images": False}
    assert said["config"]["method"] == "coma"
    assert said["config"]["options"]["lam"] == 0.4
    assert said["backbone"]["sha256"]
    assert [len(task) for task in said["tasks"]] == [2, 2, 2]
    assert {"cofima", "torch", "timm", "python"} <= said["versions"].keys()


# --- reading it back -------------------------------------------------------------------------------


def test_a_loaded_model_predicts_the_same_bits(config, tmp_path: Path) -> None:
    model = launch(config, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert torch.equal(again.logits(pixels()), model.logits(pixels()))
    assert again.classes == model.classes
    assert again.history == model.history
    assert again.tasks == model.tasks
    for key, value in model.method.state().items():
        assert torch.equal(again.method.state()[key], value), key


@pytest.mark.parametrize(("method", "network"), [("seq_ft", "resnet_test"), ("cofima", "vit_test")])
def test_plain_timm_loads_the_weights(network: str, method: str, tiny, tmp_path: Path) -> None:
    model = launch(tiny.config(method, network, train={"epochs": 1}), tmp_path / "model")
    generation = model_folder.read(tmp_path / "model")
    plain = timm.create_model(network, num_classes=len(model.classes))
    plain.load_state_dict(load_file(generation.place(BACKBONE)) | load_file(generation.place(HEAD)))
    images = pixels().float().sub(127.5).div(127.5)
    with torch.inference_mode():
        torch.testing.assert_close(plain.eval()(images), model.logits(pixels()), rtol=1e-4, atol=1e-5)
    mean_logits = model.logits(pixels())
    assert mean_logits.shape == (7, 6)


def test_loading_leaves_the_folder_alone(folder: Path) -> None:
    before = content(folder)
    load_model(folder).logits(pixels())
    assert content(folder) == before


# --- crashes while writing: see also test_generations.py ------------------------------------------------


def test_what_a_killed_process_left_is_cleared_away(folder: Path, config, tiny, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    aside = fresh / f".{'0f' * 16}.0001"
    aside.mkdir(parents=True)
    (aside / BACKBONE).write_bytes(b"half")
    (fresh / shared_name("0f" * 32)).write_bytes(b"of no generation")
    (fresh / f".{'0f' * 16}.CURRENT").write_text("0001")
    launch(config, fresh)
    assert names(fresh) == [NAME, "0002", "0003", CURRENT, BACKBONE, BACKBONE, METRICS]


# --- damage ----------------------------------------------------------------------------------------


def damages() -> Iterator[tuple[str, str, Callable[[Path], object]]]:
    """Yield a name, the file that the message must name, and what is done to it."""

    def flip(path: Path, at: float) -> None:
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    for name in (BACKBONE, HEAD, STATE, HISTORY, CONFIG):
        yield f"{name} cut short", name, lambda p: p.write_bytes(p.read_bytes()[:-20])
        yield f"{name} empty", name, lambda p: p.write_bytes(b"")
        yield f"{name} missing", name, lambda p: p.unlink()
        if name != BACKBONE:  # whose name is used again, and a folder in its place is left alone
            yield f"{name} is a folder", name, lambda p: (p.unlink(), p.mkdir())
        yield f"{name} foreign", name, lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
        for at in (0.0, 0.5, 1.0):
            yield f"{name} flipped at {at}", name, lambda p, at=at: flip(p, at)


@pytest.mark.parametrize(("name", "damage"), [pytest.param(n, d, id=i) for i, n, d in damages()])
def test_a_damaged_file_is_named_and_the_state_before_is_kept(
    name: str, damage: Callable[[Path], object], folder: Path, config
) -> None:
    path = model_folder.read(folder).place(name)
    damage(path)
    said = say(folder)
    assert str(path) in said
    assert "the state before, 0002, is kept" in said
    with pytest.raises(CofimaError):
        launch(config, folder)
    (folder / CURRENT).write_text("0002\n")  # what the message advises
    assert len(load_model(folder).tasks) == 2
    if not (folder / "0003" / name).is_file():  # what is left there is in nobody's way
        assert len(launch(config, folder).tasks) == 3


def test_foreign_tensors_under_the_right_name_are_refused(folder: Path) -> None:
    mine, other = model_folder.read(folder), model_folder.read(folder, folder / "0002")
    for name in (HEAD, BACKBONE):
        shutil.copy(other.place(name), mine.place(name))
        assert str(mine.place(name)) in say(folder)


@pytest.mark.parametrize("text", ["", "\n", "0009\n", "nonsense", "../0003", "0003/../0002", "00\x0003", "٣"])
def test_a_broken_pointer_is_named_and_the_states_are_listed(text: str, folder: Path, config) -> None:
    (folder / CURRENT).write_text(text, "utf-8")
    before = content(folder)
    said = say(folder)
    assert str(folder / CURRENT) in said
    assert "0003" in said.split(CURRENT, 1)[1]
    assert "kept" in said
    with pytest.raises(CofimaError):
        launch(config, folder)
    assert content(folder) == before


def test_a_pointer_of_foreign_bytes_is_named(folder: Path) -> None:
    (folder / CURRENT).write_bytes(b"\xff\xfe\x00")
    assert str(folder / CURRENT) in say(folder)


def test_what_is_no_model_folder_is_said(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        assert "is not a model folder" in say(place)
    file = tmp_path / "file"
    file.write_text("x")
    assert "is not a model folder" in say(file)


@pytest.mark.parametrize(("format", "age"), [(FORMAT - 1, "an older"), (FORMAT + 1, "a newer")])
def test_a_folder_of_another_format_is_refused_in_one_sentence(format: int, age: str, folder: Path) -> None:
    path = folder / "0003" / CONFIG
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {format}'))
    assert f"{folder} was written by {age} cofima (format {format}, here {FORMAT})" in say(folder)
    assert "\n" not in say(folder)


def test_a_damaged_first_generation_has_nothing_before_it(tiny, tmp_path: Path) -> None:
    launch(tiny.config("joint", train={"epochs": 0}), tmp_path / "model")
    (tmp_path / "model" / "0001" / HEAD).unlink()
    assert "there is no state before it" in say(tmp_path / "model")


# --- other people's folders ------------------------------------------------------------------------


def test_folders_of_other_people_are_never_deleted(config, tmp_path: Path) -> None:
    """Someone's runs by seed, and images by class number, have the names of generations."""
    mine = {"1993/notes.txt": "runs of this seed", "0001/cat.jpg": "an image", "0000/dog.jpg": "another"}
    for name, text in mine.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(CofimaError, match="holds 0000, 0001, 1993"):
        launch(config, tmp_path)
    assert content(tmp_path) == {name: text.encode() for name, text in mine.items()}


@pytest.mark.parametrize("name", ["0002", "1993", "0000"])
def test_folders_that_came_later_are_never_deleted_either(
    name: str, config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.txt").write_text("mine")
    monkeypatch.setattr(model_folder, "check_writable", lambda folder: None)
    assert len(launch(config, tmp_path).tasks) == 3
    assert (tmp_path / name / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    kind: str, config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr("cofima.experiment.launch.load_stream", lambda *_: pytest.fail("work began"))
    with pytest.raises(CofimaError, match="file"):
        launch(config, tmp_path / "file" if kind == "file" else tmp_path / "file" / "model")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_large_state_is_announced(config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ears(Progress):
        heard: list[str] = []  # noqa: RUF012

        def say(self, message: str) -> None:
            self.heard.append(message)

    monkeypatch.setattr("cofima.store.model.LARGE", 1000)
    launch(config, tmp_path / "model", Ears())
    assert any("writing" in line and "MB" in line for line in Ears.heard)


def test_an_empty_folder_is_in_nobodys_way(config, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    launch(config, folder)
    (folder / "0000").mkdir()
    model_folder.check_writable(folder)
    model = load_model(folder)
    save_model(model, folder)
    assert (folder / "0000").exists(), "it may be somebody's"
    (folder / "0099").mkdir()
    (folder / "0099" / "holiday.jpg").touch()
    with pytest.raises(CofimaError, match="0099"):
        model_folder.check_writable(folder)
