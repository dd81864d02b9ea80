"""The documentation site: formulas become MathML, links fit the site, and it builds without a warning."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("latex2mathml")
    pytest.importorskip("mkdocs")
    return module("hooks")


def test_every_formula_of_the_pages_becomes_mathml(hooks: ModuleType) -> None:
    made = 0
    for page in PAGES:
        text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for block, inline in re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", text, re.DOTALL):
            made += 1
            shown = hooks._mathml((block or inline).strip(), block=bool(block))
            assert "<math" in shown
            assert "\\" not in re.sub(r"<[^>]*>", "", shown), f"{page.name}: {block or inline}"
    assert made > 100


def test_the_contents_are_the_lists_of_the_first_page(hooks: ModuleType) -> None:
    nav = hooks.on_config({})["nav"]
    pages = [page for part in nav for pages in part.values() if isinstance(pages, list) for page in pages]
    named = {next(iter(page.values())) if isinstance(page, dict) else page for page in pages}
    lacking = {str(page.relative_to(ROOT / "docs")) for page in PAGES} - named - {"README.md"}
    assert not lacking  # a page that is in no list of docs/README.md is not found


def test_roles_and_formulas_of_docstrings_become_markdown() -> None:
    pytest.importorskip("griffe")
    markdown = module("docstrings").markdown
    assert markdown("See :func:`~a.b` and :math:`x_1`.") == "See `a.b` and $x_1$."
    text = "One\n\n.. math:: a\n          b\n\nTwo"
    assert markdown(text) == "One\n\n$$\na\nb\n$$\n\nTwo"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(hooks: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    formulas = (tmp_path / "methods" / "cofima.html").read_text("utf-8")
    assert "<math" in formulas
    assert "arithmatex" not in formulas
    fetched = re.findall(r'(?:src|<link[^>]*href)="(https?:[^"]*)"', formulas)
    assert not fetched  # nothing comes from elsewhere
    assert (tmp_path / "search" / "search_index.json").is_file()
