"""Each tracker against the real library: written to disk, read back, and nothing sent anywhere."""

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cofima.core.errors import CofimaError
from cofima.experiment import metrics_log, trackers
from cofima.experiment.trackers.base import scalars
from cofima.experiment.trackers.tensorboard import TensorBoard

CONFIG = {"method": "coma", "options": {"lam": 0.4}, "train": {"epochs": 2}}
ROW = {
    "accuracy": [90.0, 80.0],
    "sizes": [10, 10],
    "lam": 0.4,
    "distance": {"trained": 2.0, "merged": None, "from_start": 1.5},
    "seconds": {"train": 3.0, "total": 4.0},
    "peak_memory_mb": 100.0,
    "state_bytes": 1234,
    "notes": ["a note"],
    "classes": ["a", "b"],
}


def lines() -> list[dict[str, Any]]:
    """Return the lines of two tasks of two epochs."""
    found: list[dict[str, Any]] = []
    for task in (1, 2):
        for epoch in (1, 2):
            number = 2 * (task - 1) + epoch
            place = {"kind": "epoch", "task": task, "epoch": epoch, "step": 10 * number, "time": 1e9 + number}
            found.append(place | {"loss": 1.0 / number, "lr": 0.1, "backbone_lr": 0.001, "seconds": 0.5})
        found.append(
            {"kind": "task", "task": task, "step": 20 * task, "time": 1e9 + 5 * task, "seen": 85.0} | ROW
        )
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder with the metrics of a run."""
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / metrics_log.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines()))
    return folder


WATCHED = {"cofima", "tensorboard", "wandb", "mlflow", "databricks"}


def is_watched() -> bool:
    """Tell a tracker's connection from those of packages that other tests left running in this process."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] in WATCHED:
            return True
    return False


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Refuse every way out of this machine, in this process and in those it starts, and note who asks."""
    asked: list[Any] = []
    trap = socket.create_server(("127.0.0.1", 0))
    port = trap.getsockname()[1]
    address = f"http://127.0.0.1:{port}"

    def listen() -> None:
        while True:
            try:
                caller, _ = trap.accept()
            except OSError:
                return
            asked.append(caller.recv(200))
            caller.close()

    threading.Thread(target=listen, daemon=True).start()
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, address)
    plain = socket.socket.connect

    def connect(self: socket.socket, where: Any) -> None:
        outside = self.family != socket.AF_UNIX and (
            where[0] not in ("127.0.0.1", "::1", "localhost") or where[1] == port
        )
        if outside:
            asked.extend([where] if is_watched() else [])
            raise ConnectionRefusedError(f"{where} is outside")
        plain(self, where)

    monkeypatch.setattr(socket.socket, "connect", connect)
    yield asked
    trap.close()


def expected() -> dict[str, list[tuple[int, float]]]:
    """Return the numbers that a tracker must show, by their names, with their steps."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines():
        for name, value in scalars(line).items():
            found.setdefault(name, []).append((line["step"], value))
    return found


def test_the_watch_itself_notes_a_tracker_and_no_other(calls: list[Any]) -> None:
    ask = "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 80))\nexcept OSError:\n    pass"
    exec(ask, {"__name__": "another.package"})
    assert not calls
    exec(ask, {"__name__": "mlflow.telemetry"})
    assert calls == [("192.0.2.1", 80)]


def test_the_numbers_of_a_line_have_names() -> None:
    found = expected()
    assert found["train/loss"] == [(10, 1.0), (20, 0.5), (30, 1 / 3), (40, 0.25)]
    assert found["accuracy/seen"] == [(20, 85.0), (40, 85.0)]
    assert found["accuracy/task_2"] == [(20, 80.0), (40, 80.0)]
    assert found["distance/from_start"] == [(20, 1.5), (40, 1.5)]
    assert "distance/merged" not in found  # it was not measured
    assert {"merge/lam", "seconds/total", "seconds/epoch", "memory/peak_memory_mb"} <= found.keys()


def test_tensorboard_reads_what_was_written(run: Path, calls: list[Any]) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # the second time replaces the first
        assert trackers.replay(trackers.choose(["tensorboard"], run, CONFIG), run) == 6
    events = EventAccumulator(str(run / "trackers" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(expected())
    for name, values in expected().items():
        assert [(e.step, e.value) for e in events.Scalars(name)] == [(s, pytest.approx(v)) for s, v in values]
    assert events.Scalars("train/loss")[0].wall_time == 1e9 + 1
    assert not calls


def records(file: Path) -> Iterator[Any]:
    """Read a .wandb file: a LevelDB log of protocol buffers, in blocks of 32 KiB after seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, pieces = file.read_bytes(), 7, b""
    assert data[:4] in (b":W&B", b"")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):  # still being written
            return
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece of a record
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            yield record
            pieces = b""


def whole(file: Path) -> list[Any]:
    """Wait until wandb's own process has written the end of a run, which a busy machine delays."""
    for _ in range(120):
        found = list(records(file))
        if "exit" in [record.WhichOneof("record_type") for record in found]:
            return found
        time.sleep(0.5)
    return found


@pytest.mark.slow  # which takes seconds to import
def test_wandb_writes_offline(run: Path, calls: list[Any]) -> None:
    pytest.importorskip("wandb", reason="needs the package wandb")
    for _ in range(2):
        trackers.replay(trackers.choose(["wandb"], run, CONFIG), run)
    (file,) = (run / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    found: dict[str, list[tuple[int, float]]] = {}
    started, kinds = [], []
    for record in whole(file):
        kinds.append(record.WhichOneof("record_type"))
        if kinds[-1] == "run":
            started.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
        elif kinds[-1] == "history":
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            for name in row.keys() & expected().keys():
                found.setdefault(name, []).append((row["step"], row[name]))
    assert found == expected(), kinds
    assert started[0]["method"] == "coma"
    assert not calls


@pytest.mark.slow  # which takes seconds to import
def test_mlflow_keeps_a_run_that_goes_on(run: Path, calls: list[Any]) -> None:
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    (first,) = trackers.choose(["mlflow"], run, CONFIG)
    for line in lines()[:4]:
        first(line)
    first.close()
    trackers.replay(trackers.choose(["mlflow"], run, CONFIG), run)  # all lines again: none twice
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'trackers' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("cofima")
    (kept,) = client.search_runs([experiment.experiment_id])
    for name, values in expected().items():
        history = client.get_metric_history(kept.info.run_id, name)
        assert sorted((m.step, m.value) for m in history) == sorted(values)
    assert kept.data.params["options.lam"] == "0.4"
    assert (kept.info.run_name, kept.info.status) == ("parts", "FINISHED")
    assert not calls


def test_what_is_wrong_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cofima.experiment.trackers.find_spec", lambda name: None)
    with pytest.raises(CofimaError) as caught:
        trackers.choose(["tensorbord", "wandb:cloud", "mlflow"], tmp_path, {})
    text = str(caught.value)
    assert "3 problems" in text
    assert "tensorbord: unknown tracker; did you mean 'tensorboard'?" in text
    assert "wandb:cloud: wandb is offline, or wandb:online" in text
    assert "mlflow: mlflow, sqlalchemy, alembic not installed: pip install 'cofima[track]'" in text


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match=r"has no metrics\.jsonl and no finished task"):
        trackers.replay([], tmp_path)


def test_a_run_is_tracked_as_it_goes(tmp_path: Path, tiny: Any) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from cofima.cli.run import track
    from cofima.experiment.launch import launch

    config, folder = tiny.config(stream={"base_classes": 3, "increment": 3}), tmp_path / "run"
    trackers.tracked(["tensorboard"], config, folder, lambda heard: launch(config, folder, listeners=heard))
    place = folder / "trackers" / "tensorboard"

    def losses() -> list[float]:
        events = EventAccumulator(str(place))
        events.Reload()
        return [event.value for event in events.Scalars("train/loss")]

    known = [line["loss"] for line in metrics_log.read(folder) if line["kind"] == "epoch"]
    assert losses() == pytest.approx(known)
    for file in place.iterdir():
        file.unlink()
    trackers.tracked(["tensorboard"], config, folder, lambda heard: launch(config, folder, listeners=heard))
    assert losses() == pytest.approx(known)  # a finished run is shown as it is
    track(folder, [f"tensorboard:{tmp_path / 'all'}"])
    assert list((tmp_path / "all" / "run").iterdir())


@pytest.mark.parametrize("names", [(), ("wandb",), ("deep", "er")])
def test_nothing_is_written_through_a_link(names: tuple[str, ...], run: Path, tmp_path: Path) -> None:
    tracker = TensorBoard(run, CONFIG, "")
    (run / "trackers" / Path(*names)).parent.mkdir(exist_ok=True, parents=True)
    assert tracker.place("deep", "other") == run / "trackers" / "deep" / "other"
    (run / "trackers" / Path(*names)).symlink_to(tmp_path)
    with pytest.raises(CofimaError, match="is a symbolic link"):
        tracker.place(*names, "more")
