"""Every command that writes, with a fault at its n-th call: said, repeatable, and never a mixture."""

from pathlib import Path

import pytest

from faults.harness import ERROR, LEARN, RUN, Command, Fault, Server, Sweep

pytestmark = pytest.mark.slow  # tests/store/test_model_folder.py has kills and errors without processes
TABLES = [f"tables/report.{ending}" for ending in ("md", "csv", "tex", "html")]
TABLES += ["tables/accuracy.svg", "tables/distance.svg"]
PAGE = [f"page/{name}" for name in ("evaluation.html", "classes.csv", "confusion.csv", "confusion.svg")]
PHOTOS = ("dataset=folder:many", "data.test_fraction=0.3", "stream.base_classes=2", "stream.increment=2")
COMMANDS = {
    "rename": Command(("rename", "a", "class 0", "zero"), {"a": 3}),
    "remove-class": Command(("remove-class", "a", "class 0"), {"a": 2}),
    "undo": Command(("undo", "a"), {"a": 2}),
    "merge": Command(("merge", "a", "b", "-o", "both"), {"both": 5}),
    "merge --force": Command(("merge", "b", "b", "-o", "a", "--force"), {"a": 2}),
    "fisher": Command(("fisher", "a", "photos", "-o", "a.safetensors"), files=["a.safetensors"]),
    "card": Command(("card", "a", "-o", "README.md"), files=["README.md"], over=True),
    "export": Command(("export", "a", "--timm", "plain.safetensors"), files=["plain.safetensors"]),
    "learn": Command(("learn", "photos", *LEARN, "-o", "new"), {"new": 2}),
    "extend": Command(("extend", "b", "many", "train.epochs=1"), {"b": 6}),
    "extend -o": Command(("extend", "b", "many", "train.epochs=1", "-o", "new"), {"new": 6}),
    "run": Command((*RUN, "method=seq_ft", "-o", "run"), {"run": 6}),
    "run, with checkpoints": Command(
        (*RUN, "method=seq_ft", "-o", "run"), {"run": 6}, checkpoints=True, step=7
    ),
    "grid": Command(("grid", "grid.yaml", "-o", "grid", "-j", "1"), {"grid/*": 6}, workers=True, step=3),
    "report": Command(("report", "done", "-o", "tables"), files=TABLES, over=True),
    "evaluate": Command(("evaluate", "a", "photos", "-o", "page"), files=PAGE),
    "data prepare": Command(
        ("data", "prepare", "folder:photos", "-o", "manifest"), files=["manifest/folder-photos-seed0.jsonl"]
    ),
    "data get": Command(
        ("data", "get", "cifar100", "--data-root", "data"),
        files=[f"data/cifar-100-python/{name}" for name in ("meta", "train", "test")],
        published=True,
    ),
    "pixel cache": Command((*RUN, *PHOTOS, "method=prototype", "-o", "run"), {"run": 4}, cache=True),
    "feature cache": Command((*RUN, "method=prototype", "-o", "run"), {"run": 6}, cache=True),
}


@pytest.fixture
def sweep(request: pytest.FixtureRequest, server: Server, prepared: Path, tmp_path: Path) -> Sweep:
    return Sweep(server, prepared, tmp_path, COMMANDS[request.param])


@pytest.mark.parametrize("sweep", COMMANDS, indirect=True)
def test_a_kill_and_an_error_at_every_call(sweep: Sweep) -> None:
    faults = list(sweep.faults())
    wrong = list(filter(None, map(sweep.check, faults)))
    print(f"{sweep.calls} calls, {len(faults)} faults, {len(wrong)} failures")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("sweep", ["rename", "merge", "card", "fisher"], indirect=True)
def test_an_error_at_every_call_that_opens_a_file(sweep: Sweep) -> None:
    reads = sweep._run(sweep._copy(), Fault(reads=True)).count
    faults = [Fault(ERROR, at, 5, reads=True) for at in range(1, reads + 1)]
    wrong = list(filter(None, map(sweep.check, faults)))
    print(f"{reads} calls, {len(faults)} faults, {len(wrong)} failures")
    assert not wrong, "\n".join(wrong)
