"""``cofima merge`` and ``cofima fisher`` as a user types them."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from cofima.cli.main import main
from cofima.cli.weights import spread
from cofima.store.model import load_model
from cofima.weights import average_all


def cofima(*words: object, cwd: Path) -> tuple[int, str, str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["cofima", *map(str, words)])
        patch.setenv("COLUMNS", "200")
        with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as stop:
            main()
    return int(stop.value.code or 0), stdout.getvalue(), stderr.getvalue()


def test_lists_take_all_words_up_to_the_next_option() -> None:
    assert spread(["a", "b", "--weights", "1", "-2", "3", "-o", "x"]) == [
        *("a", "b", "--weights", "1", "--weights", "-2", "--weights", "3", "-o", "x")
    ]
    assert spread(["--fisher", "f", "--fisher", "g", "--lam", "0.5", "a"]) == [
        *("--fisher", "f", "--fisher", "g", "--lam", "0.5", "a")
    ]
    assert spread(["a", "--lam", "-1", "b"]) == ["a", "--lam", "-1", "b"]


def test_files_with_weights(files: list[Path], tmp_path: Path, same_bits) -> None:
    code, out, err = cofima("merge", *files[:3], "--weights", 1, 2, 5, "-o", "o.safetensors", cwd=tmp_path)
    assert code == 0, err
    same_bits(
        load_file(tmp_path / "o.safetensors"), average_all([load_file(f) for f in files[:3]], [1, 2, 5])
    )
    assert "merging 3 models of" in out
    assert "average, weights 1 2 5" in out
    assert "Wrote o.safetensors" in out
    _, quiet, _ = cofima("-q", "merge", *files[:2], "-o", "p.safetensors", cwd=tmp_path)
    assert quiet.startswith("Wrote p.safetensors")


def test_heads_for_different_classes(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "seven.txt").write_text("1\n2\n3\n4\n5\n6\n7\n")
    lists = ("--classes", "seven.txt", "seven.txt", "--head", "a")
    code, out, err = cofima("merge", *files[:2], *lists, "-o", "o.safetensors", cwd=tmp_path)
    assert code == 0, err
    assert "7 classes: 1, 2, 3, 4, 5, 6, 7" in out
    code, _, err = cofima("merge", *files[:2], "--skip", "a.*", "half", "-o", "p.safetensors", cwd=tmp_path)
    assert code == 0, err
    assert not {"a.weight", "a.bias", "half"} & set(load_file(tmp_path / "p.safetensors"))


def test_from_folders_and_images_to_a_merged_model(learn, tmp_path: Path) -> None:
    models = [learn("coma", ((0, 1), (2, 3))), learn("coma", ((3, 2), (4, 5), (1,)))]
    for number, model in enumerate(models):
        for name in load_model(model).classes[:2]:
            (tmp_path / f"images{number}" / name).mkdir(parents=True)
            for shade in (0, 120):
                Image.new("RGB", (16, 16), (shade, 90, 10)).save(
                    tmp_path / f"images{number}" / name / f"{shade}.png"
                )
        code, out, err = cofima(
            "fisher", model, f"images{number}", "-o", f"f{number}.safetensors", cwd=tmp_path
        )
        assert code == 0, err
        assert f"Wrote f{number}.safetensors: 4 images of 2 classes" in out
    fishers = ("--fisher", "f0.safetensors", "f1.safetensors")
    code, out, err = cofima("merge", *models, "--method", "fisher", *fishers, "-o", "both", cwd=tmp_path)
    assert code == 0, err
    assert "CoMA, 6 classes" in out
    assert "Model: both" in out
    assert len(load_model(tmp_path / "both").classes) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("merge", "a.safetensors", "-o", "o.safetensors"), "needs two models or more"),
        (("merge", "a.safetensors", "no", "-o", "o.safetensors", "--lam", "2"), "2 problems"),
        (("merge", "a.safetensors", "b.safetensors", "-o", "a.safetensors"), "would overwrite"),
        (("merge", "a.safetensors", "b.safetensors", "-o", "c.safetensors"), "--force"),
        (("merge", "a.safetensors", "b.safetensors", "-o", "o.safetensors", "-m", "ties"), "--base"),
        (("merge", "a.safetensors", "b.safetensors", "-o", "o.safetensors", "-m", "fisher"), "--fisher"),
        (("merge", "a.safetensors", "b.safetensors", "-o", "o.safetensors", "-m", "avg"), "avg"),
        (("fisher", "none", "nowhere", "-o", "f.safetensors"), "no such folder"),
    ],
)
def test_mistakes_have_exit_code_2(
    words: tuple[str, ...], message: str, files: list[Path], tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, _, err = cofima(*words, cwd=tmp_path)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
