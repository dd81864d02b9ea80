"""Run folders for the tests of reports, written by hand in the form that a run leaves behind."""

import json
import random
from itertools import chain
from pathlib import Path

import pytest

from cofima.core.atomic import file_digest
from cofima.store import model_folder
from cofima.store.record import Record

LABELS = {"seq_ft": "Seq FT", "slca": "SLCA", "coma": "CoMA", "cofima": "CoFiMA", "joint": "Joint"}


def deal(seed: int, tasks: int, per_task: int) -> list[list[str]]:
    names = [str(c) for c in range(tasks * per_task)]
    random.Random(seed).shuffle(names)
    return [names[i * per_task : (i + 1) * per_task] for i in range(tasks)]


def line(task: int, classes: list[str], accuracy: list[float], sizes: list[int], **more) -> dict:
    distance = {"trained": 2.0 * task, "merged": 1.0 * task, "from_start": 1.5 + 0.25 * task}
    return {
        "kind": "task",
        "task": task,
        "classes": classes,
        "accuracy": accuracy,
        "sizes": sizes,
        "top5": [100.0] * task,
        "task_aware": accuracy,
        "lam": None if task == 1 else 0.4,
        "distance": distance,
        "seconds": {"train": 10.0, "fisher": 2.0, "align": 0.5, "evaluate": 1.0, "total": 13.5},
        "peak_memory_mb": 812.0,
        "state_bytes": 123456,
        "notes": [],
    } | more


def build_run(
    folder: Path, method="cofima", seed=1993, matrix=None, tasks=5, per_task=2, done=None, label=None, **setup
) -> Path:
    """Write a run folder; ``matrix`` falls slowly unless given, ``setup`` replaces parts of config.json."""
    options = setup.pop("options", {"lam": 0.4} if method in ("coma", "cofima") else {})
    layout = deal(seed, tasks, per_task)
    joint = method == "joint"
    done = 1 if joint else tasks if done is None else done
    sizes = [70 + j for j in range(tasks)]
    chance = random.Random(f"{method} {seed}")
    matrix = matrix or [[95.0 - 3 * (t - j) - chance.random() for j in range(t + 1)] for t in range(tasks)]
    if joint:
        steps = [line(1, list(chain(*layout)), [97.5 + chance.random()], [sum(sizes)])]
    else:
        steps = [line(t + 1, layout[t], matrix[t], sizes[: t + 1]) for t in range(done)]
    config = {
        "method": method,
        "dataset": "digits",
        "backbone": "vit_micro",
        "seed": seed,
        "options": options,
        "train": {"epochs": 3, "lr": 0.01},
        "stream": {"base_classes": per_task, "increment": per_task},
        "data": {},
    }
    content = {
        "method": {"label": label or LABELS[method], "all_at_once": joint, "keeps_images": False},
        "config": config,
        "backbone": {"name": "vit_micro", "sha256": "0123456789abcdef" * 4},
        "data": {"name": "digits", "fingerprint": "fedcba9876543210" * 4},
        "preprocess": {"size": 64, "mean": [0.5] * 3, "std": [0.5] * 3},
        "tasks": [list(chain(*layout))] if joint else layout,
        "planned_tasks": 1 if joint else tasks,
        "versions": {"cofima": "0.1.0", "torch": "2.4.0"},
    } | setup
    save(folder, content, steps)
    return folder


def save(folder: Path, content: dict, steps: list[dict]) -> None:
    """Write a generation as the store does, hashes included."""
    generation = folder / f"{len(steps):04d}"
    generation.mkdir(parents=True, exist_ok=True)
    (generation / "history.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    files = {"history.jsonl": file_digest(generation / "history.jsonl")}
    record = Record.model_validate(content).model_copy(update={"files": files})
    (generation / "config.json").write_text(record.text())
    (folder / "CURRENT").write_text(f"{generation.name}\n")


def change_run(folder: Path, change) -> Path:
    """Let ``change`` edit config.json and the rows of the history, and write both again, hashes included."""
    generation = model_folder.read(folder)
    content = generation.record.model_dump(exclude={"files"})
    steps = [json.loads(line) for line in (generation.path / "history.jsonl").read_text().splitlines()]
    change(content, steps)
    save(folder, content, steps)
    return folder


@pytest.fixture(scope="session")
def write_run():
    """Return the function that writes a run folder."""
    return build_run


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes a run below the temporary folder and gives back its folder."""

    def make(name: str, **how) -> Path:
        return build_run(tmp_path / name, **how)

    return make


@pytest.fixture
def edit_run():
    """Return the function that changes a run folder."""
    return change_run
