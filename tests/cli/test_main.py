"""The command line as a user types it: exit codes, messages, files."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cofima import __version__
from cofima.cli.main import main
from forked import Forked

Run = Callable[..., Any]
QUICK = (
    "dataset=blobs",
    "backbone=test_vit",
    "model.pretrained=false",
    "model.img_size=32",
    "train.epochs=1",
    "train.batch_size=16",
    "data.max_train_per_class=6",
    "options.align.epochs=1",
)


def process(*words: str, cwd: Path) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "cofima", *words],
        cwd=cwd,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored below a background shell
    )


@pytest.fixture(scope="module")
def finished(cofima: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    done = cofima("run", "demo.yaml", *QUICK, "method=coma", "--out", "first", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "CoMA" in done.stdout
    assert "Model: first" in done.stdout
    return folder


def test_version(cofima: Run, tmp_path: Path) -> None:
    assert cofima("--version", cwd=tmp_path).stdout == f"cofima {__version__}\n"


def test_a_run_writes_a_model_folder(finished: Path) -> None:
    generation = finished / "first" / (finished / "first" / "CURRENT").read_text().strip()
    assert json.loads((generation / "config.json").read_text())["config"]["method"] == "coma"
    assert len((generation / "history.jsonl").read_text().splitlines()) == 3


def test_the_same_command_says_done(cofima: Run, finished: Path) -> None:
    again = cofima("run", "demo.yaml", *QUICK, "method=coma", "--out", "first", cwd=finished)
    assert again.returncode == 0
    assert "done" in again.stdout


def test_a_changed_configuration_is_refused_and_nothing_changes(cofima: Run, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (finished / "first").rglob("*")}
    refused = cofima("run", "demo.yaml", *QUICK, "method=coma", "seed=7", "--out", "first", cwd=finished)
    assert refused.returncode == 2
    assert "seed: 1993 before, 7 now" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in (finished / "first").rglob("*")} == before


def test_quiet_prints_results_only(cofima: Run, finished: Path) -> None:
    loud = cofima("run", "demo.yaml", *QUICK, "method=seq_ft", "options={}", "--out", "loud", cwd=finished)
    quiet = cofima(
        "-q", "run", "demo.yaml", *QUICK, "method=seq_ft", "options={}", "--out", "quiet", cwd=finished
    )
    assert "Seq FT: task 2/3" in loud.stdout
    assert "task 2/3" not in quiet.stdout
    assert "Last-Acc" in quiet.stdout


def test_no_color_codes_without_a_terminal(cofima: Run, finished: Path) -> None:
    assert "\x1b[" not in cofima("show", "cofima", cwd=finished).stdout
    assert "\x1b[3" not in cofima("list", "methods", cwd=finished, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_report_writes_every_format(cofima: Run, finished: Path) -> None:
    written = cofima("report", "first", "--out", "tables", cwd=finished)
    assert written.returncode == 0, written.stderr
    names = {f"report.{kind}" for kind in ("md", "csv", "tex", "html")} | {"accuracy.svg", "distance.svg"}
    assert {path.name for path in (finished / "tables").iterdir()} == names
    assert "CoMA" in (finished / "tables" / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "cofma"), "did you mean 'cofima'?"),
        (("run", "demo.yml2"), "no configuration file"),
        (("run", "demo.yaml", "epochs"), "expected key=value"),
        (("run", "demo.yaml", "dataset=digit"), "did you mean 'digits'?"),
        (("run", "demo.yaml", "backbone=vit_micr"), "did you mean 'vit_micro'?"),
        (("run", "demo.yaml", "device=cuda:99"), "device = cuda:99"),
        (("run", "demo.yaml", "train.precision=bf16", "device=cpu"), "needs a GPU"),
        (("run", "demo.yaml", "dataset=folder:nowhere"), "nowhere"),
        (
            ("run", "demo.yaml", "backbone=vit_b16_mocov3"),
            "vit-b-300ep.pth.tar and give model.checkpoint=FILE",
        ),
        (("run", "demo.yaml", "model.checkpoint=absent.npz"), "checkpoint absent.npz: no such file"),
        (("run", "demo.yaml", "backbone=resnet18", "model.final_norm=fresh"), "model.final_norm = fresh"),
        (("report", "nowhere"), "nowhere"),
    ],
)
def test_a_mistake_is_one_message_exit_code_2_and_nothing_written(
    cofima: Run, words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    failed = cofima(*words, cwd=tmp_path)
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr
    assert list(tmp_path.iterdir()) == []


def test_all_problems_are_told_at_once(cofima: Run, tmp_path: Path) -> None:
    failed = cofima("run", "demo.yaml", "sed=1", "train.epoch=2", "options.lamda=0.4", cwd=tmp_path)
    assert "3 problems" in failed.stderr
    for key in ("'seed'", "'train.epochs'", "'options.lam'"):
        assert f"did you mean {key}?" in failed.stderr


def test_a_damaged_model_names_the_file_and_what_is_kept(cofima: Run, finished: Path) -> None:
    words = ("run", "demo.yaml", *QUICK, "method=slca", "--out", "hurt")
    assert cofima(*words, cwd=finished).returncode == 0
    weights = finished / "hurt" / "0003" / "head.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    failed = cofima(*words, cwd=finished)
    assert failed.returncode == 2
    assert "hurt/0003/head.safetensors" in failed.stderr
    assert "0002, is kept" in failed.stderr


def test_interrupted_with_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    running = Forked(
        "-m", "cofima", "run", "demo.yaml", *QUICK, "train.epochs=5000", "--out", "long", cwd=tmp_path
    )
    assert "task 1" in running.stdout.readline()
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "the same command continues" in stderr
    assert "Traceback" not in stderr


def test_a_real_process_ends_with_the_same_code_and_no_traceback(tmp_path: Path) -> None:
    failed = process("history", "nowhere", cwd=tmp_path)  # it needs no torch, and ends at once
    _, stderr = failed.communicate(timeout=120)
    assert failed.returncode == 2
    assert stderr.startswith("cofima: nowhere")
    assert "Traceback" not in stderr
    assert stderr.count("\n") == 1


def test_a_path_that_the_system_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["predict", "model", "a" * 5000], ["history", "a" * 5000], ["learn", "b" * 5000]):
        monkeypatch.setattr("sys.argv", ["cofima", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr().err
        assert (stop.value.code, "file name too long" in said.lower(), "Traceback" in said) == (
            2,
            True,
            False,
        )
