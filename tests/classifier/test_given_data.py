"""Real-world photo folders: links, unknown classes, duplicates, odd names, odd files."""

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import cofima
from cofima.classifier.web.page import figure
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.store import model_folder

Photos = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


def test_evaluate_only_known_leaves_the_others_out_and_names_them(
    run: Run, three: Path, tmp_path: Path, photos: Photos
) -> None:
    known, both = (
        photos(tmp_path / "a", (0, 1, 2), first=20),
        photos(tmp_path / "b", (0, 1, 2, 5, 6), first=20),
    )
    code, _, err = run("evaluate", three, both)
    assert code == 2
    assert "class 'class 5' is not known" in err
    assert "give --only-known" in err
    classifier = cofima.load(three)
    with pytest.warns(
        CofimaWarning, match=r"left out 2 classes that the model does not know: class 5, class 6"
    ):
        found = classifier.evaluate(both, only_known=True)
    assert found.accuracy == classifier.evaluate(known).accuracy
    with (
        pytest.raises(CofimaError, match="no images of classes that the model knows"),
        pytest.warns(CofimaWarning),
    ):
        classifier.evaluate(photos(tmp_path / "c", (5, 6)), only_known=True)


def test_class_folders_that_are_links_work_in_every_command(
    run: Run, model: Path, tmp_path: Path, photos: Photos, settings: tuple[str, ...]
) -> None:
    real = photos(tmp_path / "real", (0, 1, 2, 3), first=20)
    linked, new = tmp_path / "linked", tmp_path / "new"
    linked.mkdir()
    new.mkdir()
    for label in (0, 1, 2):
        (linked / f"class {label}").symlink_to(real / f"class {label}")
    (new / "class 3").symlink_to(real / "class 3")
    (linked / "loop").symlink_to(linked)
    images = {path.name for path in real.glob("class [012]/*.png")}
    code, out, _ = run("predict", model, linked, "--json")
    assert code == 0
    assert {Path(json.loads(line)["image"]).name for line in out.splitlines()} == images
    (linked / "loop").unlink()
    assert cofima.load(model).evaluate(linked).images == 30
    assert cofima.learn(linked, settings=[*settings, "train.epochs=1"]).classes == [
        "class 0",
        "class 1",
        "class 2",
    ]
    grown = cofima.load(model)
    grown.extend(new, check=linked, epochs=1)
    assert grown.classes[-1] == "class 3"


def test_a_model_is_not_learned_into_its_own_photographs(run: Run, tmp_path: Path, photos: Photos) -> None:
    folder = photos(tmp_path / "photos", (0, 1), per_class=3)
    before = sorted(tmp_path.rglob("*"))
    for place in (folder, folder / "model", folder / "class 0"):
        code, _, err = run("learn", folder, "-o", place)
        assert (code, "the model would lie among the photographs" in err) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_learning_lists_copies_of_photographs_that_are_held_out(
    tmp_path: Path, photos: Photos, settings: tuple[str, ...]
) -> None:
    photos(tmp_path / "p" / "train", (0, 1))
    photos(tmp_path / "p" / "test", (0, 1), first=20, per_class=4)
    source = next((tmp_path / "p" / "train" / "class 1").iterdir())
    (tmp_path / "p" / "test" / "class 1" / "copy.png").write_bytes(source.read_bytes())
    with pytest.warns(CofimaWarning, match=rf"test/class 1/copy.png is train/class 1/{source.name}"):
        cofima.learn(tmp_path / "p", settings=[*settings, "train.epochs=1"])


HOSTILE = ["a\x1b]0;x\x07\u202eb", "x" * 201]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_no_class_can_have_is_refused_by_every_command(
    name: str, run: Run, three: Path, tmp_path: Path, photos: Photos
) -> None:
    folder = photos(tmp_path / "p", (5,), per_class=1)
    with (tmp_path / "list.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "label"), (next(folder.rglob("*.png")), name)])
    sources = [tmp_path / "list.csv"]
    if len(name) < 200:
        sources.append(photos(tmp_path / "q", (5,), per_class=1))
        (sources[-1] / "class 5").rename(sources[-1] / name)
    for source in sources:
        for words in (
            ("learn", source, "-o", tmp_path / "m"),
            ("extend", three, source),
            ("evaluate", three, source),
        ):
            code, out, err = run(*words)
            assert code == 2
            assert "control characters" in err or "201 characters are more than 200" in err
            assert not any(mark in out + err for mark in "\x1b\x07\u202e")
    code, _, err = run("rename", three, "class 0", name)
    assert (code, "is no name" in err) == (2, True)
    assert len(model_folder.read_history(three)) == 1


def test_predict_writes_hostile_paths_as_text_in_every_form(
    run: Run, three: Path, tmp_path: Path, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = next(photos(tmp_path / "p", (0,), per_class=1).rglob("*.png"))
    monkeypatch.chdir(tmp_path)
    for name in ("=cmd()|x.png", "-\x1b]0;x\x07\x9b.png", "[red]\u202ex[bold].png"):
        Path(name).write_bytes(source.read_bytes())
        for form in ((), ("--json",), ("--csv",)):
            code, out, _ = run("predict", three, *form, "--", name)
            assert code == 0
            assert not any(mark in out for mark in "\x1b\x07\x9b\u202e")
            if form == ("--json",):
                assert json.loads(out)["image"] == name
            if form == ("--csv",):
                assert not list(csv.reader(io.StringIO(out)))[1][0].startswith(("=", "-"))
    os.mkfifo("pipe.png")
    code, out, _ = run("predict", three, "pipe.png")
    assert (code, "not a regular file" in out) == (2, True)


def test_a_class_called_like_a_formula_is_drawn(three: Path, tmp_path: Path, photos: Photos) -> None:
    classifier = cofima.load(three)
    folder = photos(tmp_path / "p", (0, 1), first=20, per_class=2)
    names = [r"$\frac{$", "<script>alert(1)</script>"]
    for label, name in enumerate(names):
        classifier.rename(f"class {label}", name)
        (folder / f"class {label}").rename(folder / str(label))
    rows = [(path, names[int(path.parent.name)]) for path in sorted(folder.rglob("*.png"))]
    text = "\n".join(["path,label", *(f'{path},"{name}"' for path, name in rows)])
    (tmp_path / "list.csv").write_text(text)
    drawn = figure(classifier.evaluate(tmp_path / "list.csv"))
    assert r"$\frac{$" in drawn
    assert "<script>" not in drawn
