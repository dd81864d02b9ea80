"""Folders that somebody made up: one sentence for each, never a traceback, and nothing is touched elsewhere.

With right hashes a folder is what its author says; with wrong ones it is damaged.
"""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cofima.classifier.export.card import model_card
from cofima.core.atomic import file_digest, json_digest
from cofima.core.errors import CofimaError
from cofima.experiment import metrics_log
from cofima.experiment.launch import pending
from cofima.report import runs
from cofima.report.history import history_table
from cofima.store import model_folder
from cofima.store.generation import CURRENT, shared_name
from cofima.store.model import load_model, save_model
from cofima.store.model_folder import INFLIGHT
from cofima.store.record import BACKBONE, CONFIG, HEAD, HISTORY, STATE
from faults.nobody import as_nobody, open_folder

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "../../etc/passwd",
    "hf-hub:somebody/network",
    "x" * 5000,
    "\x1b[2J\n\x00",
    [],
    [[[]]],
    {},
    {"a": {"b": [1, "c"]}},
]


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder of two generations, with an entry in each part of its record."""
    folder = tmp_path_factory.mktemp("folders") / "model"
    tiny.run(folder, tiny.config("slca", train={"epochs": 0}), tiny.stream((2, 2), per_class=4))
    model = load_model(folder)
    names = model.classes
    model.serving = {
        "temperature": 1.0,
        "offsets": [0.0, 0.5, 0.0, -0.5],
        "calibrated_on": 4,
        "distances": [[0.5, 1.0]] * 4,
        "accuracy": {"right": dict.fromkeys(names, 1), "images": dict.fromkeys(names, 2)},
        "left_out": 3,
        "keep_images": 0,
        "keep_features": True,
        "fine_tuning": {"epochs": 2, "command": "0" * 64},
    }
    save_model(model, folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def use(folder: Path) -> None:
    """Do what readers do; everything but an error of ours is a failure."""
    pixels = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    for read in (
        lambda: load_model(folder).logits(pixels),
        lambda: model_card(load_model(folder), "model", None),
        lambda: runs.read(folder),
        lambda: history_table(model_folder.read_history(folder)),
    ):
        with suppress(CofimaError):
            read()


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON, the whole first."""
    yield path
    items = (
        content
        if isinstance(content, dict)
        else dict(enumerate(content if isinstance(content, list) else ()))
    )
    for key, value in items.items():
        yield from places(value, (*path, key))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return the content with another value at a path; without it, where the value is Ellipsis."""
    if not path:
        return copy.deepcopy(value)
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


def rewrite(folder: Path, content: Any, right: bool = True) -> None:
    """Replace config.json of the current generation, with its hash right or wrong."""
    if isinstance(content, dict):
        content.pop("sha256", None)
        content["sha256"] = json_digest(content) if right else "0" * 64
    (model_folder.current(folder) / CONFIG).write_text(json.dumps(content))


def record(folder: Path) -> Any:
    content = json.loads((model_folder.current(folder) / CONFIG).read_text())
    del content["sha256"]
    return content


def rehash(folder: Path, changed: Path) -> None:
    """Make the hash right for a file that was changed; a backbone gets the name of its content."""
    content = record(folder)
    name, digest = (BACKBONE if changed.parent == folder else changed.name), file_digest(changed)
    if name == BACKBONE:
        shutil.copyfile(changed, folder / shared_name(digest))
    content["files"][name] = digest
    rewrite(folder, content)


def crafted(content: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return [(path, value) for path in places(content) for value in [..., *VALUES] if path or value is not ...]


def try_all(folder: Path, cases: list[tuple[tuple[Any, ...], Any]], write: Callable[[Any], None]) -> None:
    wrong = []
    for path, value in cases:
        write((path, value))
        try:
            use(folder)
        except Exception as error:
            wrong.append(
                f"{'.'.join(map(str, path))} = {str(value)[:30]!r}: {type(error).__name__}: {error}"[:200]
            )
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong)


def sample(cases: list[Any], number: int) -> list[Any]:
    return random.Random(0).sample(cases, number)


@pytest.mark.parametrize("share", [16, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("right", [True, False])
def test_every_field_of_a_record_may_be_anything(right: bool, share: int | None, folder: Path) -> None:
    content = record(folder)
    cases = crafted(content)
    print(f"{len(cases)} records")
    try_all(
        folder,
        sample(cases, share) if share else cases,
        lambda case: rewrite(folder, changed(content, *case), right),
    )


@pytest.mark.parametrize("share", [8, pytest.param(None, marks=pytest.mark.slow)])
def test_every_field_of_a_history_may_be_anything(share: int | None, folder: Path) -> None:
    path = model_folder.current(folder) / HISTORY
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [case for case in crafted(rows[-1]) if case[0]]
    print(f"{len(cases)} histories")

    def write(case: Any) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:-1], changed(rows[-1], *case)]))
        rehash(folder, path)

    try_all(folder, sample(cases, share) if share else cases, write)


def odd_tensors(value: torch.Tensor) -> Iterator[torch.Tensor]:
    yield value[:0]
    yield torch.cat([value, value])
    yield value[None]
    yield value.reshape(-1)
    yield value.double()
    yield value.to(torch.int64)
    yield torch.full_like(value, torch.nan if value.is_floating_point() else -1)
    yield torch.full_like(value, torch.inf if value.is_floating_point() else 2**30)


@pytest.mark.parametrize("share", [8, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [BACKBONE, HEAD, STATE])
def test_every_tensor_may_be_anything(name: str, share: int | None, folder: Path) -> None:
    path = model_folder.read(folder).place(name)
    whole = load_file(path)
    path = folder / name if name == BACKBONE else path
    whole = {key: value.clone() for key, value in whole.items()}
    cases: list[tuple[tuple[Any, ...], Any]] = [((key,), ...) for key in whole] + [((), {})]
    cases += [((key,), odd) for key, value in whole.items() for odd in odd_tensors(value)]
    cases += [(("more",), torch.zeros(2))]
    print(f"{len(cases)} files of {name}")

    def write(case: Any) -> None:
        (key, *_), value = case[0] or ("",), case[1]
        tensors = {**whole, key: value} if isinstance(value, torch.Tensor) else dict(whole)
        if value is ...:
            del tensors[key]
        save_file({} if case == ((), {}) else {k: v.contiguous() for k, v in tensors.items()}, path)
        rehash(folder, path)

    try_all(folder, sample(cases, share) if share else cases, write)


@pytest.mark.parametrize("number", [12, pytest.param(2000, marks=pytest.mark.slow)])
def test_bytes_at_random(number: int, made: Path, tmp_path: Path) -> None:
    """Flip, cut or insert bytes in any file; a wrong hash is always seen, and never more than a sentence."""
    chance = random.Random(1)
    folder = Path(shutil.copytree(made, tmp_path / "model"))
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    generation = model_folder.read(folder)
    read = {generation.place(name) for name in (CONFIG, *generation.record.files)}
    for _ in range(number):
        path = chance.choice(files)
        whole, at = path.read_bytes(), chance.randrange(path.stat().st_size)
        path.write_bytes(
            chance.choice(
                [
                    whole[:at],
                    whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :],
                    whole[:at] + chance.randbytes(9) + whole[at:],
                ]
            )
        )
        use(folder)
        if path in read and path.read_bytes() != whole:
            with pytest.raises(CofimaError):
                load_model(folder)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "{}",
        "[]",
        "1",
        "null",
        '{"format": 1e999}',
        '{"format": NaN}',
        '{"format": "3"}',
        f'{{"format": {"9" * 5000}}}',
    ],
)
def test_what_is_hardly_json_is_one_sentence(text: str, folder: Path) -> None:
    (model_folder.current(folder) / CONFIG).write_text(text)
    use(folder)
    with pytest.raises(CofimaError):
        load_model(folder)


@pytest.mark.parametrize("name", [CONFIG, BACKBONE, HEAD, STATE, HISTORY, CURRENT])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself", "link to nothing", "secret"])
def test_what_is_no_file_is_one_sentence(kind: str, name: str, folder: Path) -> None:
    path = folder / name if name == CURRENT else model_folder.read(folder).place(name)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "secret":
        path.write_text("x")
        path.chmod(0)
    else:
        path.symlink_to(path if "itself" in kind else folder / "absent")
    use(folder)
    with pytest.raises(CofimaError):
        load_model(folder)


@pytest.mark.parametrize(
    "name",
    [
        *(INFLIGHT, "metrics.jsonl", "0009", CURRENT, f".{'0a' * 16}.x", ".lock.holder"),
        *(BACKBONE, shared_name("0" * 64)),
    ],
)
def test_nothing_is_written_or_removed_through_a_link(name: str, folder: Path, tmp_path: Path) -> None:
    """A file, and a folder of files that look like ours, elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere / "deep")
    (elsewhere / f".{'0b' * 16}.mine").write_text("mine")
    (elsewhere / "checkpoint.safetensors").write_text("mine")
    target = elsewhere / "deep" / CURRENT if name in (CURRENT, "metrics.jsonl", ".lock.holder") else elsewhere
    if name == BACKBONE:
        name = model_folder.read(folder).place(BACKBONE).name
        target = elsewhere / "deep" / name
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)
    before = {str(path): path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    with suppress(CofimaError):
        save_model(load_model(folder), folder)
        save_model(load_model(folder), folder)
        model_folder.undo(folder)
    assert {str(path): path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before


NUMBERS = [
    "0000",
    "0002",
    "0004",
    "9999",
    "10000",
    "0" * 5,
    "00003",
    "9" * 18,
    "9" * 30,
    "٣",
    "-1",
    "1e3",
    "",
]
POINTERS = ["..", "../elsewhere", "0003/../0002", "0003\n0002", "/", "0003\0", "x" * 5000, "\udcff", *NUMBERS]


def change_structure(folder: Path, elsewhere: Path, chance: random.Random) -> None:
    """Change names, numbers, links and kinds of what is in a model folder, but not what a user put there."""
    paths = [path for path in sorted(folder.rglob("*")) if not {*path.parts} & {*MINE}]
    path, other = chance.choice(paths), chance.choice(paths)
    how = chance.randrange(7)
    if how == 0:
        discard(folder / CURRENT)
        (folder / CURRENT).write_text(chance.choice(POINTERS), "utf-8", errors="surrogateescape")
    elif how == 1 and path != other:
        target = path.with_name(chance.choice([name for name in NUMBERS if name]))
        if not os.path.lexists(target):
            path.rename(target)
    elif how == 2 and path.is_dir():
        target = path.with_name(chance.choice([name for name in NUMBERS if name]))
        if not os.path.lexists(target):
            shutil.copytree(path, target, symlinks=True)
    elif how == 3 and path.is_file() and other.is_file() and path != other:
        content = other.read_bytes()
        path.unlink()
        path.write_bytes(content)
    elif how > 3:
        discard(path)
        if how == 4:
            path.symlink_to(chance.choice([elsewhere, elsewhere / "photo.jpg", other, folder, path]))
        elif how == 5:
            chance.choice([Path.mkdir, Path.touch, os.mkfifo])(path)


def discard(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


MINE = {"0500": "photo.jpg", ".2024.my_photos": "photo.jpg", "mine": "notes.txt"}


@pytest.mark.parametrize("number", [12, pytest.param(800, marks=pytest.mark.slow)])
def test_structures_at_random(number: int, made: Path, tmp_path: Path) -> None:
    """Whatever the numbers, links and kinds of files, nothing of a user's is touched, there or elsewhere."""
    chance = random.Random(4)
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    wrong = []
    for case in range(number):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(elsewhere, ignore_errors=True)
        shutil.copytree(made, folder)
        shutil.copytree(made, elsewhere)
        for where in [elsewhere, *(folder / name for name in MINE)]:
            where.mkdir(exist_ok=True)
            (where / MINE.get(where.name, "photo.jpg")).write_text("mine")
        for name in (INFLIGHT, f".{'0a' * 16}.0004"):
            (folder / name).mkdir()
            (folder / name / "checkpoint.safetensors").write_bytes(chance.randbytes(30))
        (folder / "metrics.jsonl").write_text('{"kind": "task", "task": 1, "step": 0, "time": 0}\n')
        for _ in range(chance.randint(1, 4)):
            change_structure(folder, elsewhere, chance)
        before = contents(elsewhere) | contents(*(folder / name for name in MINE))
        try:
            use(folder)
            write(folder)
        except Exception as error:
            wrong.append(f"case {case}: {type(error).__name__}: {error}"[:300])
        if contents(elsewhere) | contents(*(folder / name for name in MINE)) != before:
            wrong.append(f"case {case}: something of the user's has changed")
    assert not wrong, f"{len(wrong)} of {number}:\n" + "\n".join(wrong)


def write(folder: Path) -> None:
    """Do what writers do; everything but an error of ours is a failure."""
    for change in (
        lambda: save_model(load_model(folder), folder),
        lambda: model_folder.undo(folder),
        lambda: pending(folder),
        lambda: metrics_log.mend(folder, model_folder.read_history(folder)),
        lambda: save_model(load_model(folder), folder),
    ):
        with suppress(CofimaError):
            change()


def contents(*folders: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize(
    "name",
    ["", "0003", "0002", CURRENT, BACKBONE, *(f"0003/{file}" for file in (CONFIG, HEAD, STATE))],
)
def test_what_may_not_be_read_is_one_sentence(name: str, made: Path) -> None:
    with open_folder() as place:
        folder = Path(shutil.copytree(made, place / "model"))
        name = model_folder.read(folder).place(name).name if name == BACKBONE else name
        (folder / name).chmod(0)
        with as_nobody():
            use(folder)
            with pytest.raises(CofimaError) if name != "0002" else nullcontext():
                load_model(folder)
            with pytest.raises(CofimaError):
                model_folder.undo(folder)
        (folder / name).chmod(0o755)
