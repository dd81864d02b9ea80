"""Models of a method in a user's own file are merged by what it declares of its state."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cofima
from cofima.core import plugins
from cofima.core.errors import CofimaError
from cofima.data.sources.in_memory import blobs
from cofima.data.stream import from_groups
from cofima.store.model import load_model

FIRST, SECOND = ((0, 1), (2, 3)), ((3, 2), (4, 5))  # share the classes 2 and 3, in another order

METHOD = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cofima.data.stream import Task
from cofima.methods import Method
from cofima.methods.state import Entry


def together(rows):
    return {
        "images": torch.cat([row["images"] for row in rows]),
        "each": sum(row["each"] for row in rows),
        "first": rows[0]["first"],
    }


def largest(rows):
    return {"top": torch.stack([row["top"] for row in rows]).amax(0)}


@dataclass(eq=False)
class Mine(Method):
    """Keep something of every kind."""

    label: ClassVar[str] = "Mine"
    state_schema: ClassVar[tuple[Entry, ...]] = (
        Entry("means", axis="class", merge="average"),
        Entry("counts", axis="class", dim=1, merge="sum"),
        Entry("top", axis="class", merge="pool", pool=largest),
        Entry("kept.", axis="class", merge="pool", pool=together, ragged="images", lengths="each"),
        Entry("moved.", axis="weight", merge="sum"),
        Entry("total", merge="sum"),
        Entry("tasks", merge="last"),
        MORE
    )

    def end(self, task: Task) -> None:
        draw = torch.Generator().manual_seed(task.classes.stop)
        classes = task.classes.stop
        self.kept = {
            "means": torch.rand(classes, 3, generator=draw),
            "counts": torch.randint(9, (2, classes), generator=draw),
            "top": torch.rand(classes, generator=draw),
            "kept.each": (each := torch.arange(classes) % 3),
            "kept.images": torch.rand(int(each.sum()), 2, generator=draw),
            "kept.first": torch.rand(classes, generator=draw),
            "total": torch.rand(4, generator=draw),
            "tasks": torch.tensor(task.index),
            KEPT
        }
        for key, value in self.net.named_parameters():
            self.kept[f"moved.{key}"] = value.detach().clone()

    def state(self) -> dict[str, Tensor]:
        return self.kept

    def restore(self, state: dict[str, Tensor]) -> None:
        self.kept = state
'''


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end without plugins."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setenv(plugins.ENVIRONMENT, "")
    yield
    for name in [name for name in sys.modules if name.startswith("cofima_plugin_")]:
        del sys.modules[name]


@pytest.fixture
def pair(tiny: Any, tmp_path: Path) -> Callable[..., list[Path]]:
    """Return what writes the method with one more entry into a file, and learns two models with it."""

    def learned(more: str = "", kept: str = "") -> list[Path]:
        (tmp_path / "mine.py").write_text(METHOD.replace("MORE", more).replace("KEPT", kept), "utf-8")
        plugins.load(tmp_path / "mine.py")
        folders = [tmp_path / "a", tmp_path / "b"]
        for folder, groups in zip(folders, (FIRST, SECOND), strict=True):
            stream = from_groups(blobs(6, per_class=4, side=16), groups)
            tiny.run(folder, tiny.config("mine", train={"epochs": 1}), stream)
        return folders

    return learned


def rows(classes: Sequence[str], values: Tensor) -> dict[str, Tensor]:
    return dict(zip(classes, values, strict=True))


def test_every_kind_of_entry_is_merged_as_it_is_declared(pair: Any, tmp_path: Path) -> None:
    folders = pair()
    done = cofima.merge(folders, tmp_path / "out", lam=0.3)
    assert (done.label, done.notes) == ("Mine", [])
    a, b, found = (load_model(path) for path in (*folders, tmp_path / "out"))
    one, two, both = (model.method.state() for model in (a, b, found))
    assert found.classes == [*a.classes, *b.classes[2:]]
    for key, dim, merged in (
        ("means", 0, lambda x, y: torch.lerp(x, y, 0.3)),
        ("counts", 1, lambda x, y: x + y),
        ("top", 0, torch.maximum),
    ):
        mine = rows(a.classes, one[key].movedim(dim, 0))
        other = rows(b.classes, two[key].movedim(dim, 0))
        for name, value in rows(found.classes, both[key].movedim(dim, 0)).items():
            shared = name in mine and name in other
            torch.testing.assert_close(
                value, merged(mine[name], other[name]) if shared else mine.get(name, other.get(name))
            )
    torch.testing.assert_close(both["total"], one["total"] + two["total"])
    assert int(both["tasks"]) == 1
    key = "moved.backbone.cls_token"
    torch.testing.assert_close(both[key], one[key] + two[key])
    heads = [
        rows(
            model.classes, torch.cat([state[f"moved.head.blocks.{k}.bias"] for k in range(len(model.tasks))])
        )
        for model, state in ((a, one), (b, two), (found, both))
    ]
    for name, value in heads[2].items():
        torch.testing.assert_close(value, heads[0].get(name, 0) + heads[1].get(name, torch.tensor(0.0)))


def test_any_number_of_rows_a_class_is_pooled_class_by_class(pair: Any, tmp_path: Path) -> None:
    folders = pair()
    cofima.merge(folders, tmp_path / "out")
    models = [load_model(path) for path in (*folders, tmp_path / "out")]
    one, two, both = (
        rows(model.classes, torch.split(state["kept.images"], state["kept.each"].tolist()))
        for model, state in ((model, model.method.state()) for model in models)
    )
    assert both.keys() == one.keys() | two.keys()
    for name, value in both.items():
        mine = [part[name] for part in (one, two) if name in part]
        assert torch.equal(value, torch.cat(mine))


def test_an_entry_that_refuses_leaves_a_model_of_a_generic_method(pair: Any, tmp_path: Path) -> None:
    done = cofima.merge(pair('Entry("secret"),', '"secret": torch.zeros(3),'), tmp_path / "out")
    (note,) = done.notes
    assert note.startswith("of Mine; it continues as Seq FT, and leaves behind: ")
    assert "secret" in note
    assert load_model(tmp_path / "out").method.state() == {}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("", "Mine keeps 'secret', which is not in the state_schema"),
        ('Entry("secret", predicts="a decision tree"),', "predicts with a decision tree"),
        ('Entry("secret", axis="class"),', r"Mine keeps 'secret' of shape \[3\]"),
    ],
)
def test_what_cannot_be_merged_is_refused(more: str, reason: str, pair: Any, tmp_path: Path) -> None:
    folders = pair(more, '"secret": torch.zeros(3),')
    with pytest.raises(CofimaError, match=reason):
        cofima.merge(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()
