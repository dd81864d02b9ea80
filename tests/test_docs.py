"""The documentation says what the code does: examples run, commands parse, tables and links hold."""

import ast
import importlib.util
import json
import pkgutil
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
import yaml
from PIL import Image
from safetensors.torch import load_file

import cofima
from cofima import methods
from cofima.cli.catalog import options
from cofima.cli.main import app, split_plugins
from cofima.core import plugins
from cofima.core.errors import CofimaWarning
from cofima.core.settings import flat
from cofima.data.sources.in_memory import blobs
from cofima.experiment import config
from cofima.experiment.launch import launch
from cofima.store.config import Config

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
METHOD_FILE = "# src/cofima/methods/"
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text("utf-8")) if language in languages]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text("utf-8"))


def yaml_files() -> dict[str, str]:
    """Return the configurations that the pages show, by the file name in their first line."""
    texts = [text for page in DOCS for text in blocks(page, "yaml")]
    return {text.splitlines()[0].removeprefix("# "): text for text in texts}


def command_lines() -> list[tuple[str, str]]:
    """Return every line of a shell example that calls cofima, with its page."""
    found = []
    for page in PAGES:
        indented = re.findall(r"^ {4}.*$", prose(page), re.MULTILINE)
        for line in "\n".join([*blocks(page, "console", "bash", "sh"), *indented]).splitlines():
            if line.strip().startswith("cofima "):
                found.append((name_of(page), line.strip().split("  #")[0]))
    return found


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_code(tables: ModuleType, subtests: pytest.Subtests) -> None:
    for page in DOCS:
        text = page.read_text("utf-8")
        with subtests.test(page=name_of(page)):
            assert tables.fill(text) == text, "write it anew with: python docs/tables.py"


def test_every_option_and_key_has_a_meaning(tables: ModuleType) -> None:
    rows = [line for table in tables.tables().values() for line in table.splitlines()]
    assert not [row for row in rows if re.search(r"\|\s*\|$", row)]


def test_the_configuration_page_has_every_key() -> None:
    keys = flat(Config().model_dump(exclude={"options"}))
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert not [key for key in keys if f"| `{key}` |" not in page]


def test_every_method_has_a_page_that_names_its_options(subtests: pytest.Subtests) -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    for method in methods.names():
        with subtests.test(method=method):
            text = (ROOT / "docs" / "methods" / f"{method}.md").read_text("utf-8")
            missing = [o.name for o in options(method) if f"| `options.{o.name}` | `{o.default}`" not in text]
            assert [name for name in missing if f"| `options.{name}` | `null`" not in text] == []
            assert "$$" in text
            assert f"methods/{method}.md" in index


def test_no_page_is_of_a_method_that_is_gone() -> None:
    assert {page.stem for page in DOCS if page.parent.name == "methods"} == set(methods.names())


def slugs(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def leads_nowhere(page: Path, link: str) -> bool:
    """Tell whether a link within the repository has no target; addresses elsewhere are not looked at."""
    if link.startswith(("http://", "https://")):
        return False
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or bool(anchor and anchor not in slugs(target))


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    assert [f"{name_of(page)}: {link}" for page, link in links if leads_nowhere(page, link)] == []


def defined(file: Path) -> set[str]:
    """Return the functions, classes, constants and methods that a module defines, as ``Class.method``."""
    body = ast.parse(file.read_text("utf-8")).body
    inner = [(f"{node.name}.", part) for node in body if isinstance(node, ast.ClassDef) for part in node.body]
    found = set()
    for prefix, node in [*(("", node) for node in body), *inner]:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        found |= {prefix + str(getattr(one, "name", getattr(one, "id", ""))) for one in targets}
    return found


def wrong_paths(text: str) -> list[str]:
    """Return the files, and names in them (``file.py:name``), that a text mentions and that do not exist."""
    found = []
    for path, name in re.findall(r"`((?:\w+/)+\w+\.py|(?:src|tests)/[\w/]*)(?::([A-Za-z_][\w.]*))?`", text):
        file = next((at for at in (ROOT / path, ROOT / "src" / "cofima" / path) if at.exists()), None)
        if "NAME" not in path and (file is None or (name and name not in defined(file))):
            found.append(f"{path}:{name}")
    return found


def wrong_modules(text: str) -> list[str]:
    """Return the dotted names of our modules and their members that a text mentions and that do not exist."""
    found = []
    for name in re.findall(r"`(cofima(?:\.\w+)+)", text):
        keys = {"cofima.classes", "cofima.json", "cofima.preprocess", plugins.GROUP}  # in files, not modules
        if name not in keys:
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                found.append(name)
    return found


def test_files_and_modules_that_are_named_exist() -> None:
    others = {"fidelity.md"}  # cites files of other people's repositories
    pages = [page for page in [*PAGES, *BENCHMARKS] if page.name not in others]
    texts = {name_of(page): page.read_text("utf-8") for page in pages}
    found = {page: wrong_paths(text) + wrong_modules(text) for page, text in texts.items()}
    assert {page: names for page, names in found.items() if names} == {}


def test_the_check_itself_sees_a_file_or_a_name_that_is_gone() -> None:
    gone = (
        "`serve/lesson.py` `data/stream.py:deal` `cofima.serve.learn` `data/stream.py:Task.gone` `tests/n/`"
    )
    here = "`data/stream.py:Task.taught` `src/cofima/store/` `methods/NAME.py` `cofima.core.seeds.Seeds`"
    assert len(wrong_paths(gone)) + len(wrong_modules(gone)) == 5
    assert wrong_paths(here) + wrong_modules(here) == []


def test_what_a_method_declares_and_overrides_has_these_names() -> None:
    cells = first_cells("../CONTRIBUTING.md", "Adding a method")
    cells |= first_cells("tutorial_researcher.md", "Add a method")
    named = {re.split(r"[( =:]", cell)[0] for cell in cells}
    assert {"state_schema", "first_task_key", "cost", "loss", "fixed_features"} <= named
    assert not {name for name in named if not hasattr(methods.Method, name)}


def test_the_index_links_to_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in DOCS if page.name != "README.md"]
    assert not [page for page in pages if f"]({page})" not in index]


COMMAND = re.compile(r"(?<!from )(?<![\w=/.-])cofima ([a-z][\w-]*)")


def mentioned(page: Path) -> set[str]:
    """Return the commands that a page names, in its text and in its examples."""
    code = re.findall(r"`([^`\n]+)`", prose(page)) + blocks(page, "console", "bash", "sh")
    return {word for text in code for word in COMMAND.findall(text)}


def test_no_page_mentions_a_command_that_does_not_exist() -> None:
    found = {name_of(page): mentioned(page) - COMMANDS.keys() for page in PAGES}
    assert {page: unknown for page, unknown in found.items() if unknown} == {}


def parse(line: str) -> None:
    """Parse a command line; an unknown command or option, or a missing argument, raises."""
    _, name, *words = split_plugins(shlex.split(line))[1]
    command = COMMANDS[name]
    while hasattr(command, "commands"):  # a command of commands, such as data or analyze
        name, *words = words
        command = command.commands[name]
    command.make_context(name, words)


def test_command_lines_parse(subtests: pytest.Subtests) -> None:
    assert len(command_lines()) > 50
    for page, line in command_lines():
        with subtests.test(page=page, line=line):
            parse(line)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder that has the configurations which the pages show."""
    monkeypatch.chdir(tmp_path)
    for name, text in yaml_files().items():
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def test_runs_that_are_shown_have_a_valid_configuration(elsewhere: Path, subtests: pytest.Subtests) -> None:
    (elsewhere / "photos").mkdir()
    for page, line in command_lines():
        if not line.startswith("cofima run") or {"$", "--plugin"} & {*line, *line.split()}:
            continue
        with subtests.test(page=page, line=line):
            _, _, *words = shlex.split(re.sub(r"folder:\S+", "folder:photos", line))
            given = COMMANDS["run"].make_context("run", words).params
            assert config.read(given["config"], given["overrides"] or []).method in methods.names()


def test_configurations_that_are_shown_are_valid(elsewhere: Path) -> None:
    (elsewhere / "photos").mkdir()
    assert {"parts.yaml", "groups.yaml"} <= yaml_files().keys()
    for name, text in yaml_files().items():
        assert config.read(name).method == yaml.safe_load(text).get("method", "cofima")


def first_cells(page: str, heading: str) -> set[str]:
    """Return the names in the first column of the table below a heading."""
    text = (ROOT / "docs" / page).read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {
        name
        for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        for name in re.findall(r"`(.*?)`", row)
    }


def test_the_page_of_the_model_folder_has_every_key(tmp_path: Path, tiny: Any) -> None:
    tiny.run(tmp_path, tiny.config("cofima"), tiny.stream((2, 2), per_class=6))
    kept = json.loads((tmp_path / "0002" / "config.json").read_text("utf-8"))
    rows = [
        json.loads(line) for line in (tmp_path / "0002" / "history.jsonl").read_text("utf-8").splitlines()
    ]
    assert first_cells("model_folder.md", "config.json") == kept.keys()
    assert first_cells("model_folder.md", "history.jsonl") == rows[-1].keys()
    page = (ROOT / "docs" / "model_folder.md").read_text("utf-8")
    inside = [
        *kept["backbone"],
        *kept["preprocess"],
        *kept["data"],
        *rows[-1]["seconds"],
        *rows[-1]["distance"],
    ]
    assert not [key for key in inside if f"`{key}`" not in page]
    state = load_file(tmp_path / "0002" / "state.safetensors")
    assert {key.partition(".")[0] for key in state} == {"raw_head", "gaussians", "fisher"}
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert names == {".lock", "CURRENT", "0001", "0002", "backbone", "metrics.jsonl"}


def photos(folder: Path, classes: tuple[str, ...], first: int = 0) -> None:
    """Write a few photographs of each class: coloured blobs."""
    images = blobs(first + len(classes), per_class=6, side=64).train
    for label, name in enumerate(classes, start=first):
        (folder / name).mkdir(parents=True)
        for place in (images.labels == label).nonzero()[:, 0]:
            pixels, _ = images.batch(place[None])
            Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(folder / name / f"{int(place)}.jpg")


def learn_parts(folder: Path) -> None:
    """Do what the engineer's tutorial does up to its first Python example, on a small backbone."""
    photos(folder / "photos", ("accordion", "mandolin", "saxophone"))
    photos(folder / "new", ("electric_guitar",), first=3)
    small = [
        "backbone=vit_micro",
        "train.epochs=1",
        "options.align.epochs=1",
        "options.align.samples_per_class=8",
    ]
    cofima.learn(folder / "photos", folder / "instruments", settings=small)


FRAMEWORKS = ("transformers", "lightning", "avalanche")


def framework(text: str) -> str:
    """Return the optional package that an example imports, or nothing."""
    found = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
    return next((name for name in found if name in FRAMEWORKS), "")


WITH_PYTHON = [page for page in DOCS if blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_examples_run(page: Path, elsewhere: Path) -> None:
    if page.name == "tutorial_engineer.md":
        learn_parts(elsewhere)
    namespace: dict[str, Any] = {"__name__": page.stem}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CofimaWarning)
        for number, text in enumerate(blocks(page, "python"), start=1):
            if not text.startswith(METHOD_FILE) and not framework(text):
                exec(compile(text, f"{name_of(page)}, example {number}", "exec"), namespace)
    assert len(namespace) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_examples_of_frameworks_run(name: str, elsewhere: Path) -> None:
    pytest.importorskip(name, reason=f"the extra [{name}] is not installed")
    (text,) = (text for page in DOCS for text in blocks(page, "python") if framework(text) == name)
    exec(compile(text, f"example of {name}", "exec"), {"__name__": name})


@pytest.fixture
def example_method(tmp_path: Path) -> Iterator[str]:
    """Add the method that the researcher's tutorial writes, as if its file were in the package."""
    (text,) = (
        t for t in blocks(ROOT / "docs" / "tutorial_researcher.md", "python") if t.startswith(METHOD_FILE)
    )
    file = text.splitlines()[0].removeprefix(METHOD_FILE)
    (tmp_path / file).write_text(text, "utf-8")
    methods.__path__.append(str(tmp_path))
    yield file.removesuffix(".py")
    methods.__path__.remove(str(tmp_path))
    sys.modules.pop(f"cofima.methods.{file.removesuffix('.py')}", None)


def test_the_example_of_a_method_keeps_its_promises(example_method: str, tmp_path: Path, tiny: Any) -> None:
    assert example_method in methods.names()
    assert [option.name for option in options(example_method)] == ["strength"]

    def learned(method: str, **options: float) -> Any:
        where = tmp_path / f"{method} {options}"
        return tiny.run(where, tiny.config(method, options=options), tiny.stream((2, 2), per_class=6))

    free, plain = learned(example_method, strength=0), learned("seq_ft")
    held = learned(example_method, strength=10)
    assert all(torch.equal(value, plain.weights()[key]) for key, value in free.weights().items())
    far, near = (model.history[-1].distance.from_start for model in (free, held))
    assert near < 0.9 * far


def test_the_example_of_a_method_continues_to_the_same_bits(
    example_method: str, tmp_path: Path, tiny: Any, stop_at: Any, same_bits: Any
) -> None:
    how = tiny.config(example_method, options={"strength": 1.0})
    whole = launch(how, tmp_path / "whole").weights()
    stopped = stop_at(1)
    with pytest.raises(stopped):
        launch(how, tmp_path / "cut")
    same_bits(launch(how, tmp_path / "cut").weights(), whole)


def test_extras_are_quoted_as_zsh_needs_it() -> None:
    naked = re.compile(r"pip install (?:-\S+ )*[\w.]*\[")
    places = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.yaml")]
    assert not [path.name for path in places if naked.search(path.read_text("utf-8"))]


def test_the_address_of_the_repository_is_one_and_on_the_checklist() -> None:
    text = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")}
    (address,) = set(re.findall(r"git clone (\S+)", text["README.md"]))
    assert f"`{address}`" in text["CONTRIBUTING.md"].partition("## Before a release")[2]
    cloned = {found for page in PAGES for found in re.findall(r"git clone (\S+)", page.read_text("utf-8"))}
    assert cloned == {address}


def test_the_work_of_table_1_is_what_the_recipe_says(tables: ModuleType) -> None:
    train, test, epochs, tasks = 50_000, 10_000, 20, 10  # CIFAR-100
    fisher = 1.3 * (train + train * 9 / 10)  # of each task, and of merged weights after all but the first
    forward = train + test * (tasks + 1) / 2  # Gaussians; all classes seen, after each task
    work = 3 * (epochs * train + fisher) + forward
    (row,) = [line for line in tables.tables()["work"].splitlines() if line.startswith("| CoFiMA |")]
    assert row.split(" | ")[3] == f"{work * tables.VIT_B16 / 1e15:,.0f}"
