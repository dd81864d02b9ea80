"""Commands for classifiers, end to end: output, exit codes, files, and a kill at any moment."""

import csv
import io
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import cofima
from cofima.classifier import measure
from cofima.store import model_folder

Photos = Callable[..., Path]


def test_learn_says_what_it_rests_on_and_what_to_do_next(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, photos: Photos, settings: tuple[str, ...]
) -> None:
    code, out, _ = run(
        "learn",
        photos(tmp_path / "p", (0, 1)),
        "-o",
        tmp_path / "m",
        "--epochs",
        "2",
        *settings[:3],
        *settings[4:],
    )
    assert code == 0
    assert re.search(r"Learned 2 classes from 20 images", out)
    assert "on 18 images, each judged by all others" in out
    assert f"cofima extend {tmp_path / 'm'}" in out


def test_extend_history_undo_rename_and_remove_class(
    run: Callable[..., tuple[int, str, str]], model: Path, tmp_path: Path, photos: Photos
) -> None:
    code, out, _ = run("extend", model, photos(tmp_path / "new", (3, 4)), "--epochs", "1")
    assert code == 0
    assert "Learned 2 new classes: class 3, class 4" in out
    assert "measured on the features of 30 images" in out
    assert run("rename", model, "class 3", "third")[0] == 0
    assert cofima.load(model).classes == ["class 0", "class 1", "class 2", "third", "class 4"]
    code, out, _ = run("remove-class", model, "third")
    assert "4 classes are left" in out
    assert "the state before, which undo returns to, still knows it" in out
    rows = cofima.load(model).history
    assert rows[-1].kept_features == rows[-3].kept_features - 10  # those of the class are gone
    code, out, _ = run("history", model)
    for word in ("learn", "extend", "rename", "class 3 -> third", "remove class"):
        assert word in out
    assert f"Features of {rows[-1].kept_features} images are kept in it" in out
    assert run("undo", model)[0] == 0
    assert "third" in cofima.load(model).classes
    code, _, err = run("undo", model)
    assert (code, "nothing to undo" in err) == (2, True)
    assert run("remove-class", model, "thrid")[2].strip().endswith("did you mean 'third'?")


def test_another_folder_leaves_the_model_as_it_is(
    run: Callable[..., tuple[int, str, str]], model: Path, tmp_path: Path, photos: Photos
) -> None:
    new = photos(tmp_path / "new", (3,))
    assert run("extend", model, new, "-o", tmp_path / "other", "--epochs", "1")[0] == 0
    assert model_folder.current(model).name == "0002"
    assert len(cofima.load(tmp_path / "other").classes) == 4
    code, _, err = run("extend", model, photos(tmp_path / "newer", (4,)), "-o", tmp_path / "other")
    assert (code, "holds a model already" in err) == (2, True)


def test_a_broken_budget_exits_with_3_and_a_table(
    run: Callable[..., tuple[int, str, str]],
    model: Path,
    tmp_path: Path,
    photos: Photos,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learn = measure.learn_part

    def careless(learned, *rest, **how):  # type: ignore[no-untyped-def]
        row = learn(learned, *rest, **how)
        learned.method.head().blocks[0].bias.data.fill_(-1e9)  # old classes are never named again
        return row

    monkeypatch.setattr(measure, "learn_part", careless)
    check, new = photos(tmp_path / "check", (0, 1, 2), first=20), photos(tmp_path / "new", (3, 4))
    code, out, err = run("extend", model, new, "--check", check, "--max-drop", "1", "--epochs", "1")
    assert code == 3
    assert "more than the 1 allowed" in err
    assert "Traceback" not in err
    assert "before %" in out
    assert model_folder.current(model).name == "0002"
    assert len(cofima.load(model).classes) == 3


def test_a_budget_that_cannot_be_checked_is_a_warning(
    run: Callable[..., tuple[int, str, str]], model: Path, tmp_path: Path, photos: Photos
) -> None:
    new = photos(tmp_path / "new", (3,))
    run("extend", model, new, "--keep-images", "0", "--no-keep-features", "--epochs", "1")
    code, out, err = run("extend", model, photos(tmp_path / "next", (4,)), "--max-drop", "1", "--epochs", "1")
    assert code == 0
    assert "--max-drop was not checked: no features of their images are kept" in err
    assert "Old classes: unknown" in out


def test_kept_features_measure_the_loss_of_old_classes(
    run: Callable[..., tuple[int, str, str]], model: Path, tmp_path: Path, photos: Photos
) -> None:
    run("extend", model, photos(tmp_path / "new", (3,)), "--keep-images", "0")
    code, out, err = run("extend", model, photos(tmp_path / "next", (4,)), "--max-drop", "50")
    assert (code, err) == (0, "")
    assert re.search(r"points (lost|gained), 90 % interval .* measured on the features of 40 images", out)


def test_predict_in_all_its_forms(
    run: Callable[..., tuple[int, str, str]], three: Path, tmp_path: Path
) -> None:
    folder = three.parent / "photos"
    files = sorted(folder.rglob("*.png"))
    code, out, _ = run("predict", three, folder, "--json", "--top", "2")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, [row["image"] for row in rows]) == (0, [str(path) for path in files])
    assert all(len(row["best"]) == 2 for row in rows)
    bad = tmp_path / "bad.jpg"
    bad.write_text("no image")
    code, out, err = run("predict", three, "-", "--csv", stdin=f"{files[0]}\n{bad}\n")
    table = list(csv.DictReader(io.StringIO(out)))
    assert code == 1
    assert "1 of 2 images could not be read" in err
    assert [row["error"] for row in table] == ["", "not an image, or of an unknown format"]
    assert table[0]["label"] in cofima.load(three).classes
    assert run("predict", three, bad)[0] == 2
    assert run("predict", three, tmp_path / "gone.png")[0] == 2
    code, out, _ = run("predict", three, files[0], "--unknown", "0.05")
    assert code == 0
    assert "%" in out


def test_evaluate_writes_a_page_that_needs_nothing_else(
    run: Callable[..., tuple[int, str, str]], three: Path, tmp_path: Path, photos: Photos
) -> None:
    folder = photos(tmp_path / "test", (0, 1), first=20)
    (folder / "class 0").rename(folder / "class 2")  # named wrongly: certain to be confused
    code, out, _ = run("evaluate", three, folder, "--out", tmp_path / "found")
    assert code == 0
    assert "Most confused" in out
    page = (tmp_path / "found" / "evaluation.html").read_text()
    assert "data:image/jpeg;base64," in page
    assert "class 2, taken for class 0" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    table = list(csv.reader((tmp_path / "found" / "confusion.csv").open()))
    assert sum(int(cell) for row in table[1:] for cell in row[1:]) == 20
    assert table[0][1:] == ["class 0", "class 1", "class 2"]
    drawn = re.findall(r">(\d+)</text>", (tmp_path / "found" / "confusion.svg").read_text())
    assert sorted(drawn) == sorted(cell for row in table[1:] for cell in row[1:] if cell != "0")
    by_class = {row["class"]: row for row in csv.DictReader((tmp_path / "found" / "classes.csv").open())}
    assert by_class["class 2"]["images"] == "10"
    (folder / "class 2").rename(folder / "strange")
    assert "class 'strange' is not known" in run("evaluate", three, folder)[2]


@pytest.mark.parametrize(
    "command", ["undo", "history", "predict", "evaluate", "extend", "rename", "remove-class"]
)
def test_what_is_no_model_folder_is_said_so(
    command: str, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    more = {"predict": [tmp_path / "a.png"], "evaluate": ["x"], "extend": ["x"], "rename": ["a", "b"]}
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, _, err = run(command, folder, *more.get(command, ["x"] if command == "remove-class" else []))
        assert code == 2
        assert "is not a model folder" in err


def test_a_kill_at_any_moment_leaves_a_model_that_predicts(
    model: Path, tmp_path: Path, photos: Photos
) -> None:
    """A process that extends, removes a class and saves again and again is killed at random moments."""
    new = photos(tmp_path / "new", (3,), per_class=5)
    chance, reached = random.Random(5), set()
    for turn in range(4):
        heard, told = os.pipe()
        child = os.fork()  # a process of its own, without the seconds that starting one takes
        if not child:
            try:
                for _ in range(1000):
                    clf = cofima.load(model)
                    clf.extend(new, epochs=1)
                    clf.save()
                    os.write(told, b".")
                    clf.remove_class("class 3")
                    clf.save()
                    os.write(told, b".")
            finally:
                os._exit(1)
        for _ in range(turn % 3):  # so many changes are through, and another is under way
            os.read(heard, 1)
        time.sleep(chance.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.close(heard)
        os.close(told)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])  # it was still at work
        clf = cofima.load(model)
        assert clf.classes[:3] == ["class 0", "class 1", "class 2"]
        assert clf.predict(sorted(new.rglob("*.png"))[0])[0].label in clf.classes
        reached.add(model_folder.current(model).name)
        if len(clf.classes) > 3:
            clf.remove_class("class 3")
            clf.save()  # and it can go on
    assert len(reached) > 1
