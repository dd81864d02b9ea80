"""Methods and datasets in a file outside the package: found when named, in every process, and only then."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import cofima
from cofima import methods
from cofima.cli.main import load_plugin, main, split_plugins
from cofima.core import plugins
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.data import datasets
from cofima.data.options import DataOptions
from cofima.experiment.config import check
from cofima.experiment.grid import shared_first_task
from cofima.experiment.launch import launch
from cofima.store.model import load_model

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
EMPTY = "x = 1\n"
METHOD = """
from dataclasses import dataclass
from typing import ClassVar
from cofima.methods.seq_ft import SeqFT

@dataclass(eq=False)
class Mine(SeqFT):
    '''Fine-tune.'''
    label: ClassVar[str] = "Mine"
"""


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end without plugins."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setenv(plugins.ENVIRONMENT, "")
    yield
    for name in [name for name in sys.modules if name.startswith("cofima_plugin_")]:
        del sys.modules[name]


def example(folder: Path) -> Path:
    """Write the file that the page shows."""
    (text,) = re.findall(r"^```python\n(# stripes\.py\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (folder / "stripes.py").write_text(text, "utf-8")
    return folder / "stripes.py"


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text, "utf-8")
    return folder / name


@pytest.mark.usefixtures("forked_workers")
def test_the_example_works_from_outside_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command loads it here; the grid's worker, a Python of its own, finds it by the environment."""
    example(tmp_path)
    (tmp_path / "small.yaml").write_text(
        "{method: stripes, dataset: stripes, stream: {base_classes: 2, increment: 2},"
        " train: {epochs: 1, batch_size: 8}, grid: {seed: [1]}}"
    )
    words = ["grid", "small.yaml", "--jobs", "1", "--plugin", "stripes.py", "--out", "runs"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cofima", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code in (0, None), printed.err + printed.out
    assert "Mean replay" in printed.out
    monkeypatch.setattr(plugins, "_loaded", {})  # as in a process that comes later
    monkeypatch.setenv(plugins.ENVIRONMENT, "")
    (folder,) = (tmp_path / "runs").iterdir()
    kept = json.loads((folder / "0002" / "config.json").read_text())
    (said,) = kept["plugins"]
    assert (said["name"], said["file"]) == ("stripes", "stripes.py")
    assert kept["data"]["split_id"] == "stripes:drawn"
    with pytest.raises(CofimaError, match=r"'stripes' is not loaded: give --plugin PATH/stripes\.py"):
        load_model(folder)
    plugin = plugins.load(tmp_path / "stripes.py")
    assert plugin.sha256 == said["sha256"]
    assert load_model(folder).method.label == "Mean replay"
    plugin.file.write_text(plugin.file.read_text() + "\n# later\n")
    plugins.load(plugin.file)
    with pytest.warns(CofimaWarning, match="has changed since"):
        load_model(folder)


def test_the_example_takes_part_in_what_it_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugin(str(example(tmp_path)))
    said = {"stream": {"base_classes": 2, "increment": 2}, "train": {"epochs": 1, "batch_size": 8}}
    one, two = (
        check({"method": "stripes", "dataset": "stripes", **said, "options": {"strength": s}}) for s in (0, 1)
    )
    assert shared_first_task.key(one) == shared_first_task.key(two) is not None
    launch(two, tmp_path / "run")
    classifier = cofima.load(tmp_path / "run")
    before, gone = classifier.model.method.state()["means"], classifier.classes[2]
    classifier.remove_class(gone)
    after = classifier.model.method.state()["means"]
    assert torch.equal(after, torch.cat([before[:2], before[3:]]))
    classifier.save(tmp_path / "less")
    merged = cofima.merge([tmp_path / "run", tmp_path / "less"], tmp_path / "both", lam=0.5)
    assert (merged.label, gone in merged.classes) == ("Mean replay", True)
    kept = load_model(tmp_path / "both").method.state()["means"]
    torch.testing.assert_close(kept, before)
    kind = methods.find("stripes")
    monkeypatch.setattr(kind, "state_schema", ())
    with pytest.raises(CofimaError) as refused:
        classifier.remove_class(classifier.classes[0])
    assert f"cofima: {refused.value}\n" in PAGE.read_text("utf-8")


def test_a_dataset_of_a_plugin_is_one_like_any_other(tmp_path: Path) -> None:
    load_plugin(str(example(tmp_path)))
    assert "stripes" in datasets.names()
    assert datasets.describe("stripes") == "4 classes of drawn stripes"
    assert check({"method": "stripes", "dataset": "stripes"}).options == {"strength": 0.1}
    loaded = datasets.load("stripes", 16, options=DataOptions())
    assert (len(loaded.train), len(loaded.test)) == (48, 24)
    assert {"split_hash", "fingerprint"} <= loaded.facts.keys()


def test_a_model_without_plugins_records_none(tmp_path: Path, tiny: Any) -> None:
    tiny.run(tmp_path, tiny.config(), tiny.stream((2,), per_class=4))
    assert json.loads((tmp_path / "0001" / "config.json").read_text())["plugins"] == []


def test_a_plugin_is_found_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mine" not in methods.names()
    monkeypatch.setenv(plugins.ENVIRONMENT, str(write(tmp_path, METHOD)))
    assert "mine" in methods.names()
    assert methods.find("mine").label == "Mine"


def test_loading_tells_later_processes_where_it_is(tmp_path: Path) -> None:
    file = plugins.load(write(tmp_path, METHOD)).file
    plugins.load(file)
    assert os.environ[plugins.ENVIRONMENT].split(os.pathsep) == [str(file)]


def test_an_installed_package_brings_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    write(tmp_path / "my_package", METHOD, "__init__.py")
    info = tmp_path / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1\n")
    entries = "[cofima.plugins]\ntheirs = my_package\nbroken = my_package.nowhere\n"
    (info / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(tmp_path)
    plugins._installed.cache_clear()
    try:
        with pytest.warns(CofimaWarning, match=r"my_package\.nowhere .* cannot be loaded"):
            assert methods.find("theirs").label == "Mine"
    finally:
        plugins._installed.cache_clear()
        sys.modules.pop("my_package", None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine.py", None, "there is no such file"),
        ("mine.txt", EMPTY, "not a Python file"),
        ("my-method.py", EMPTY, "cannot be one"),
        ("mine.py", "x = = 1\n", r"mine\.py line 1: SyntaxError"),
        ("mine.py", "\n\nimport nowhere_to_be_found\n", r"line 3: ModuleNotFoundError"),
        ("mine.py", EMPTY, "defines no method .* and no dataset"),
        ("mine.py", METHOD + METHOD.replace("Mine", "Other"), r"several methods \(Mine, Other\)"),
        ("coma.py", METHOD, "'coma' is a method of cofima; rename the file"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_said(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        write(tmp_path, text, name)
    with pytest.raises(CofimaError, match=message):
        load_plugin(str(tmp_path / name))


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    plugins.load(write(tmp_path, METHOD))
    (tmp_path / "other").mkdir()
    with pytest.raises(CofimaError, match="have the same name"):
        plugins.load(write(tmp_path / "other", METHOD))


def test_a_plugin_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(CofimaError):
        plugins.load(write(tmp_path, "1 / 0\n"))
    assert "cofima_plugin_mine" not in sys.modules
    assert isinstance(plugins.load(write(tmp_path, METHOD)).module, ModuleType)


def test_plugins_may_stand_anywhere_in_a_command() -> None:
    words = ["run", "--plugin", "a.py", "demo.yaml", "--plugin=b.py", "seed=1", "--", "--plugin", "c.py"]
    assert split_plugins(words) == (
        ["a.py", "b.py"],
        ["run", "demo.yaml", "seed=1", "--", "--plugin", "c.py"],
    )
    with pytest.raises(CofimaError, match="needs a Python file"):
        split_plugins(["run", "--plugin"])
