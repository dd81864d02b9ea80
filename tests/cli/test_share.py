"""The commands export, card, push and app, as a user types them."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from typer.testing import CliRunner

from cofima.cli.main import app
from cofima.core.errors import CofimaError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    where = tmp_path_factory.mktemp("commands") / "parts"
    tiny.run(where, tiny.config("ranpac", train={"epochs": 1}), tiny.stream((2, 1), per_class=6))
    return where


def cofima(*words: object) -> str:
    """Return what a command prints; a user's mistake is raised."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_export_says_what_it_compared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("cofima.cli.share.say", said.append)
    cofima("export", folder, "--torchscript", tmp_path / "a.pt")
    assert said[0].startswith(f"Wrote {tmp_path / 'a.pt'}")
    assert "on 8 images drawn at random: logits differ by at most" in said[1]


def test_export_refuses_before_any_file_is_written(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match="give a file to write: --onnx FILE"):
        cofima("export", folder)
    with pytest.raises(CofimaError, match="RanPAC predicts with a random projection"):
        cofima("export", folder, "--torchscript", tmp_path / "a.pt", "--timm", tmp_path / "a.safetensors")
    with pytest.raises(CofimaError, match="not a model folder"):
        cofima("export", tmp_path, "--torchscript", tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())


def test_the_card_is_printed_or_written(folder: Path, tmp_path: Path) -> None:
    printed = cofima("card", folder, "--license", "mit")
    assert "license: mit" in printed
    assert "# parts" in printed
    cofima("card", folder, "--license", "mit", "-o", tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text("utf-8") == printed


def test_push_is_refused_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CofimaError, match="HF_HUB_OFFLINE is set"):
        cofima("push", folder, "me/parts")


def test_the_page_needs_its_extra_and_a_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    with pytest.raises(CofimaError, match=r"pip install 'cofima\[app\]'"):
        cofima("app", folder)


def test_help_names_the_extra_and_says_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "Needs cofima[app]." in cofima("app", "--help")
    for command in app.registered_commands:  # what typer reads as markup is the docstring, word by word
        shown, meant = Text.from_markup(command.help or "").plain, inspect.getdoc(command.callback) or ""
        assert shown.split() == meant.split()
        assert [len(part.splitlines()) for part in shown.split("\n\n")] == [1] * len(meant.split("\n\n"))


def test_no_option_is_cut_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("learn", "extend"):
        text = cofima(command, "--help")
        assert "…" not in text
        assert "--keep-features" in text
        assert "--no-keep-features" in text
