"""The page: complete, closed in itself, safe with any text, and readable in a real browser."""

import csv
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from cofima import report
from cofima.core.errors import CofimaError
from cofima.report import drawing
from cofima.report.html import page as html_page

VOID = {"meta", "br", "hr", "img", "link", "input"}
NASTY = '<script>alert("x")</script>&"\''
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Reader(HTMLParser):
    """Collect tags, attributes and text, and check that what is opened is closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def study(write_run, tmp_path_factory):
    """Three methods of one protocol, two seeds each, and one run of another."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("slca", "cofima", "joint"):
        for seed in (1, 2):
            write_run(folder / f"{method}-{seed}", method=method, seed=seed)
    label = "A method with quite a long name"
    write_run(folder / "long", label=label, tasks=12, per_task=3, options={"lam": "auto"})
    return report.find([folder])


@pytest.fixture(scope="module")
def page(study):
    return html_page(study)


def test_the_page_is_closed_in_itself(page):
    reader = Reader(page)
    assert reader.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    outside = [a for a in reader.attributes if a[1] in ("src", "href", "srcset") and not a[2].startswith("#")]
    assert outside == []
    assert "url(http" not in page
    assert "@import" not in page


def test_ids_are_unique_and_every_reference_has_its_target(page):
    reader = Reader(page)
    ids = [value for _, name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value[1:] for _, name, value in reader.attributes if name == "href"}
    used |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert used <= set(ids)


def test_a_page_has_what_readers_need(page):
    reader = Reader(page)
    assert ("html", "lang", "en") in reader.attributes
    assert "<title>cofima report" in page
    assert reader.tags.count("h1") == 1
    drawings = reader.tags.count("svg")
    assert drawings == reader.tags.count("figcaption") == 2 * 2 + 3  # two tables; three methods have a matrix
    assert (
        sum(tag == "svg" and name == "aria-label" and bool(value) for tag, name, value in reader.attributes)
        == drawings
    )
    for word in ("Last-Acc", "Inc-Acc", "Forgetting", "Distance", "Seconds", "What the numbers mean"):
        assert word in reader.text
    assert reader.tags.count("details") == 7
    assert "cofima run config.yaml" in reader.text
    assert "lam: 0.4" in reader.text
    assert "prefers-color-scheme: dark" in page


def test_numbers_of_the_table_are_on_the_page(study, page):
    text = Reader(page).text
    for comparison in report.compare(study):
        for row in comparison.table.rows:
            assert all(str(cell) in text for cell in row.cells)


def test_no_color_of_the_figures_is_left_for_one_theme_only(page):
    style, body = page.split("</style>", 1)
    assert not any(color in body for color in (drawing.INK, drawing.GRID, *drawing.SERIES))
    used = set(re.findall(r"var\((--[\w-]+)\)", body + style)) - {"--least"}
    assert all(style.count(f"{name}:") == 2 for name in used)  # once light, once dark


def test_everything_is_escaped(make_run, edit_run):
    folder = make_run("a", label=NASTY, options={"text": NASTY}, versions={NASTY: NASTY})
    edit_run(folder, lambda _, steps: steps[0].update(classes=[NASTY, "b"], notes=[NASTY]))
    page = html_page([report.read(folder)])
    reader = Reader(page)
    assert "script" not in reader.tags
    assert reader.open == []
    assert reader.text.count(NASTY) >= 5


def test_the_same_runs_give_the_same_page(study, page):
    assert page == html_page(study[::-1])


def test_an_unfinished_run_is_said_to_be_so(make_run):
    text = Reader(html_page([report.read(make_run("a", done=3))])).text
    assert "3 of 5 tasks so far" in text


def test_write_gives_tables_page_and_figures_and_leaves_nothing_else(study, page, tmp_path):
    out = tmp_path / "deep" / "out"
    paths = report.write(study, out)
    assert [path.name for path in paths[:4]] == ["report.md", "report.csv", "report.tex", "report.html"]
    drawings = {path.stem.split("-")[0] for path in paths[4:]}
    assert drawings == {"accuracy", "distance"}
    assert all(path.suffix == ".svg" and "<svg" in path.read_text() for path in paths[4:])
    assert sorted(out.iterdir()) == sorted(paths)
    assert paths[3].read_text() == page
    with paths[1].open(newline="") as file:
        assert len(list(csv.DictReader(file))) == sum(len(each.table.rows) for each in report.compare(study))


def test_a_failed_write_keeps_the_old_report(study, tmp_path, monkeypatch):
    written = report.write(study[:2], tmp_path / "out")
    before = [path.read_bytes() for path in written]

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CofimaError, match=r"report\.md could not be written \(No space left"):
        report.write(study[:1], tmp_path / "out")
    assert [path.read_bytes() for path in written] == before
    assert len(list((tmp_path / "out").iterdir())) == len(written)


def test_no_runs_no_report(tmp_path):
    with pytest.raises(CofimaError, match="no runs to report"):
        report.write([], tmp_path)
    assert list(tmp_path.iterdir()) == []


MEASURE = """
const page = frame.contentDocument, figures = [...page.querySelectorAll('svg')];
const box = element => element.getBoundingClientRect();
const texts = figure => [...figure.querySelectorAll('text')];
const letters = figures.flatMap(figure => texts(figure).map(text => [box(text), box(figure)]));
document.title = JSON.stringify({
  width: page.documentElement.scrollWidth,
  figures: figures.filter(figure => box(figure).height > 100).length,
  clipped: letters.filter(([a, b]) => a.left < b.left - 1 || a.right > b.right + 1).length,
  smallest: Math.min(...letters.map(([a]) => Math.max(a.width, a.height))),
});
"""
QUIET = ("quic", "sync", "gpu", "background-networking", "component-update")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_in_a_browser(page, tmp_path, width):
    """Open the page at phone and desktop width, all its boxes open: only tables scroll, in their boxes."""
    (tmp_path / "page.html").write_text(page.replace("<details>", "<details open>"))
    frame = f'<iframe id="frame" src="page.html" style="width: {width}px; height: 900px; border: 0"></iframe>'
    script = f"<script>frame.onload = () => {{{MEASURE}}}</script>"
    (tmp_path / "wrapper.html").write_text(f"<!DOCTYPE html><title></title>{frame}{script}")
    options = [*OPTIONS, *(f"--disable-{name}" for name in QUIET), f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *options, "--dump-dom", f"file://{tmp_path}/wrapper.html"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    seen = json.loads(re.search("<title>(.+)</title>", result.stdout)[1])
    assert seen["width"] == width
    assert seen["figures"] == 7
    assert seen["clipped"] == 0
    assert seen["smallest"] >= 8
