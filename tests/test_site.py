"""The documentation site: formulas become MathML, links fit the site, it builds without a warning and is read
in a browser, on a desk and on a phone, without a network."""

import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


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


def test_signs_in_indices_are_tight_and_names_in_tables_break_after_marks(hooks: ModuleType) -> None:
    shown = hooks._mathml("F^*_{t-1} - 1", block=False)
    assert '<mo lspace="0" rspace="0">−</mo><mn>1</mn></mrow><mo lspace="0" rspace="0">∗</mo>' in shown
    assert "<mo>−</mo>" in shown  # between terms there is space
    table = "<table><td><code>a/b.py:c_d</code> a.b</td></table><p><code>a.b</code></p>"
    broken = "<table><td><code>a/<wbr>b.<wbr>py:<wbr>c_<wbr>d</code> a.b</td></table><p><code>a.b</code></p>"
    assert hooks.on_page_content(table) == broken


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


@pytest.fixture(scope="module")
def site(hooks: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning is an error."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    formulas = (site / "methods" / "cofima.html").read_text("utf-8")
    assert "<math" in formulas
    assert "arithmatex" not in formulas
    fetched = re.findall(r'(?:src|<link[^>]*href)="(https?:[^"]*)"', formulas)
    assert not fetched  # nothing comes from elsewhere
    assert (site / "search" / "search_index.json").is_file()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Be silent."""


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


# Names of what is wrong on a page: wider than the window, formulas of no size, pictures that are not there.
FAULTS = """() => {
    const faults = [], room = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth > room)
        faults.push(`${document.documentElement.scrollWidth} px wide on ${room}`);
    for (const formula of document.querySelectorAll("math"))
        if (!formula.closest("details") && !(formula.getBoundingClientRect().height > 0))
            faults.push(`no size: ${formula.textContent}`);
    for (const picture of document.querySelectorAll("article img"))
        if (!picture.naturalWidth) faults.push(`no picture: ${picture.src}`);
    return faults;
}"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_is_whole_in_a_browser_and_search_finds(width: int, site: Path, served: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
    wrong: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 844})
        page.on("request", lambda r: None if r.url.startswith((served, "data:")) else wrong.append(r.url))
        page.on("console", lambda m: wrong.append(f"{page.url}: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
        for name in pages:
            page.goto(served + name)
            wrong += [f"{name}: {fault}" for fault in page.evaluate(FAULTS)]
        page.goto(served + "index.html")
        if width < 700:
            page.click("label.md-header__button[for=__search]")
        page.fill("input.md-search__input", "Fisher")
        found = page.locator(".md-search-result__item a").first
        found.wait_for()
        found.click()
        page.wait_for_url("**/*.html**")
        assert "Fisher" in page.locator("article").inner_text()
        browser.close()
    assert len(pages) > 60
    assert not wrong, "\n".join(wrong)
