"""The web page: concurrent predictions, one change at a time, and no access to other files."""

import html
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cofima
from cofima.classifier.web.session import Limits, Session
from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.store import model_folder

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
COLOURS = {"red": (220, 30, 30), "green": (30, 190, 40), "blue": (30, 60, 220), "yellow": (230, 220, 40)}
# cells of a table whose text is wider than they are, or that reach beyond the table's own box
CUT = """table => { const right = table.getBoundingClientRect().right + 1;
    return [...table.querySelectorAll("[role=gridcell]")].filter(cell => cell.offsetParent !== null &&
        (cell.getBoundingClientRect().right > right ||
         [cell, ...cell.querySelectorAll("*")].some(part => part.scrollWidth > part.clientWidth + 1 &&
            part.clientWidth > 0 && part.textContent.trim()))).map(cell => cell.textContent.trim()) }"""
FIGURES = Path(__file__).parents[3] / "docs" / "figures"


def paint(folder: Path, name: str, count: int, first: int = 0) -> list[Path]:
    """Write photographs of a class: its color, with noise and a brighter spot somewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(first, first + count):
        chance = np.random.default_rng([number, len(name)])
        image = np.full((48, 48, 3), COLOURS[name]) + chance.normal(0, 12, (48, 48, 3))
        x, y = chance.integers(0, 36, 2)
        image[y : y + 12, x : x + 12] += 35
        paths.append(folder / f"{name}{number}.png")
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app")
    for name in ("red", "green", "blue"):
        paint(folder / "photos" / name, name, 8)
    settings = [
        "model.pretrained=false",
        "train.batch_size=8",
        "train.lr=0.05",
        "train.backbone_lr_scale=0.02",
    ]
    where = folder / "colors"
    cofima.learn(
        folder / "photos", where, backbone="vit_test", epochs=8, seed=1, keep_images=2, settings=settings
    )
    return where


@pytest.fixture
def model(learned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(learned, tmp_path / "colors"))


def test_many_ask_and_a_new_class_is_learned_and_undone(model: Path, tmp_path: Path) -> None:
    session = Session(model)
    yellow = paint(tmp_path / "y", "yellow", 8)
    others = [paint(tmp_path / "o", name, 1, first=90)[0] for name in ("red", "green", "blue")]
    assert [one.label for one in session.ask(others)] == ["red", "green", "blue"]
    assert len(session.ask(others)[0].best) == 3
    done = session.add(" yellow ", yellow[:7])
    assert done.new == ["yellow"]
    assert done.old is not None
    assert session.classifier.classes == ["blue", "green", "red", "yellow"]
    assert session.ask(yellow[7:])[0].best[0][0] == "yellow"
    assert [row.kind for row in session.history()] == ["learn", "extend"]
    session.undo()
    assert session.classifier.classes == ["blue", "green", "red"]
    with pytest.raises(CofimaError, match="nothing to undo"):
        session.undo()


def test_what_is_no_image_too_large_or_too_many_is_said(model: Path, tmp_path: Path) -> None:
    session = Session(model, Limits(files=3, megabytes=1, megapixels=1))
    good = paint(tmp_path / "g", "red", 1)[0]
    fake, heavy, wide = (tmp_path / name for name in ("fake.jpg", "heavy.png", "wide.png"))
    fake.write_text("no image")
    heavy.write_bytes(good.read_bytes() + b"0" * 1_000_001)
    Image.new("1", (2000, 1000)).save(wide)
    answers = session.ask([good, fake, wide])
    assert answers[0].label == "red"
    assert [one.error for one in answers[1:]] == [
        "not an image, or damaged",
        "2000 x 1000 is more than 1 million pixels",
    ]
    with pytest.raises(
        CofimaError, match=r"3 problems:\n.*fake.jpg: not an image(.|\n)*larger than 1 MB(.|\n)*wide"
    ):
        session.add("new", [fake, heavy, wide])
    for call in (lambda: session.ask([good] * 4), lambda: session.add("new", [good] * 4)):
        with pytest.raises(CofimaError, match="4 files at once: at most 3"):
            call()
    with pytest.raises(CofimaError, match="no images were given"):
        session.ask([])
    with pytest.raises(CofimaError, match="give the new class a name"):
        session.add(" ", [good])
    assert model_folder.current(model) == Session(model).classifier.generation
    assert len(session.history()) == 1


class Halted(Progress):
    """Stop at the first bar until it may go on."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def track(self, items: Any, total: int, label: str) -> Iterator[Any]:
        self.begun.set()
        assert self.go.wait(30)
        yield from items


def test_while_one_learns_others_ask_and_a_second_learner_is_told(model: Path, tmp_path: Path) -> None:
    session, halted = Session(model), Halted()
    yellow, red = paint(tmp_path / "y", "yellow", 6), paint(tmp_path / "r", "red", 1, first=90)
    thread = threading.Thread(target=lambda: session.add("yellow", yellow, halted))
    thread.start()
    try:
        assert halted.begun.wait(30)
        for change in (lambda: session.add("other", yellow), session.undo):
            with pytest.raises(CofimaError, match="somebody else is changing the model"):
                change()
        assert session.ask(red)[0].label == "red"
        assert len(session.classifier.classes) == 3
    finally:
        halted.go.set()
        thread.join(60)
    assert session.classifier.classes[-1] == "yellow"


def test_a_change_from_outside_is_seen(model: Path) -> None:
    session = Session(model)
    other = cofima.load(model)
    other.rename("red", "crimson")
    other.save()
    assert "crimson" in session.classifier.classes


@pytest.fixture
def served(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("gradio", reason="needs cofima[app]")
    from cofima.classifier.web import app

    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    (tmp_path / "uploads").mkdir()
    page, where = app.serve(Session(model), tmp_path / "uploads", "127.0.0.1", None)
    yield where
    page.close(verbose=False)


def status(url: str, data: bytes | None = None, **headers: str) -> int:
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def asked(served: str, function: dict[str, Any], kinds: dict[int, str], path: str) -> dict[str, Any]:
    """Call a function of the page as its script would, with a file; return how it ended."""
    httpx = pytest.importorskip("httpx")
    files, session = [{"path": path, "meta": {"_type": "gradio.FileData"}}], uuid.uuid4().hex
    data = [files if kinds[part] == "file" else "new" for part in function["inputs"]]
    body = {"data": data, "fn_index": function["id"], "session_hash": session}
    httpx.post(f"{served}gradio_api/queue/join", json=body)
    with httpx.stream("GET", f"{served}gradio_api/queue/data?session_hash={session}", timeout=30) as events:
        for line in events.iter_lines():
            event = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
            if event.get("msg") == "process_completed":
                return dict(event)
    raise AssertionError("the page did not answer")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_file_outside_the_uploads_can_be_read(
    served: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    monkeypatch.chdir(tmp_path)
    assert served.startswith("http://127.0.0.1:")
    assert status(served) == 200
    inside = next(model.glob("*/config.json"))
    tries = [secret, inside, "/etc/passwd", "secret.txt", "../../../../etc/passwd", "..%2f..%2fetc%2fpasswd"]
    tries += [f"{tmp_path}/uploads/../secret.txt", f"{tmp_path}/uploads/%2e%2e/secret.txt"]
    for path in tries:
        assert status(f"{served}gradio_api/file={path}") in (403, 404), path
        assert status(f"{served}file={path}") in (403, 404), path
    httpx = pytest.importorskip("httpx")
    hidden = paint(tmp_path / "hidden", "red", 1)[0]  # an image that the page would name, were it read
    config = json.load(urllib.request.urlopen(f"{served}config"))
    kinds = {part["id"]: part["type"] for part in config["components"]}
    taking = [f for f in config["dependencies"] if {kinds[i] for i in f["inputs"]} & {"file", "image"}]
    assert taking
    for function in taking:
        ended = asked(served, function, kinds, str(hidden))
        assert (ended["success"], ended["output"].get("data")) == (False, None)
    assert not [file for file in (tmp_path / "uploads").rglob("*") if file.is_file()]
    with hidden.open("rb") as file:  # the same call with what was uploaded is answered
        uploaded = httpx.post(f"{served}gradio_api/upload", files={"files": file}).json()[0]
    assert asked(served, taking[0], kinds, uploaded)["success"]
    assert cofima.load(model).classes == ["blue", "green", "red"]


NOTE_WHAT_IS_SAID = """() => {
    window.said = [];
    const note = () => window.said.push(document.querySelector("#said")?.textContent ?? "");
    new MutationObserver(note).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_in_a_real_browser_predict_add_a_class_see_it_and_undo(served: str, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    yellow = [str(path) for path in paint(tmp_path / "y", "yellow", 9)]
    others = [
        str(path) for name in ("red", "green", "blue") for path in paint(tmp_path / "o", name, 3, first=90)
    ]
    fake, notes = tmp_path / "fake.png", tmp_path / "notes.txt"
    fake.write_text("no image")
    notes.write_text("no image either")
    keep = FIGURES if os.environ.get("COFIMA_SCREENSHOTS") else tmp_path
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        page.set_default_timeout(90_000)
        expect = playwright.expect
        expect.set_options(timeout=90_000)
        page.goto(served)
        expect(page.locator("#head")).to_contain_text("It knows 3 classes: blue, green, red")
        page.set_input_files("#asked input[type=file]", [*others, str(fake)])
        expect(page.locator("#asked")).to_contain_text("fake")
        page.click("#ask")
        answers = page.locator("#answers")
        expect(answers).to_contain_text("fake.png")
        expect(answers).to_contain_text("not an image, or damaged")
        for name in ("red", "green", "blue"):
            expect(answers).to_contain_text(name)
        assert answers.evaluate(CUT) == []
        expect(page.locator("#gallery img")).to_have_count(9)  # three rows
        wrap = page.locator("#gallery .grid-wrap")
        assert wrap.evaluate("one => one.scrollHeight <= one.clientHeight")
        page.screenshot(path=keep / "app_ask.png", full_page=True)
        page.get_by_role("tab", name="Add a class").click()
        page.fill("#name textarea, #name input", "yellow")
        page.set_input_files("#photos input[type=file]", yellow[:8])
        expect(page.locator("#photos")).to_contain_text("yellow7")
        page.evaluate(NOTE_WHAT_IS_SAID)
        page.click("#add")
        expect(page.locator("#said")).to_contain_text("Learned yellow")
        assert any("steps" in text for text in page.evaluate("window.said"))  # the bar, while it learned
        expect(page.locator("#head")).to_contain_text("It knows 4 classes")
        expect(page.locator("#changes")).to_contain_text("green")
        page.screenshot(path=keep / "app_add.png", full_page=True)
        expect(page.locator("#name textarea, #name input")).to_have_value("")  # ready for the next class
        expect(page.locator("#photos")).not_to_contain_text("yellow7")
        page.set_input_files("#photos input[type=file]", [*yellow[:6], str(notes)])
        page.fill("#name textarea, #name input", " yellow ")
        expect(page.locator("#photos")).to_contain_text("notes")
        page.click("#add")  # a known class is not changed without a word
        expect(page.locator("#confirm")).to_contain_text("yellow is known already")
        page.screenshot(path=keep / "app_confirm.png", full_page=True)
        page.click("#unsure")
        expect(page.locator("#sure")).not_to_be_visible()
        page.click("#add")
        page.click("#sure")
        expect(page.locator("body")).to_contain_text("notes.txt: not an image, or damaged")
        expect(page.locator("#head")).to_contain_text("It knows 4 classes")
        second = browser.new_page()  # another visitor asks for the new class
        second.set_default_timeout(90_000)
        second.goto(served)
        second.set_input_files("#asked input[type=file]", [yellow[8]])
        expect(second.locator("#asked")).to_contain_text("yellow8")
        second.click("#ask")
        expect(second.get_by_role("gridcell", name="yellow", exact=True)).to_be_visible()
        page.get_by_role("tab", name="History").click()
        expect(page.locator("#history")).to_contain_text("extend")
        page.screenshot(path=keep / "app_history.png", full_page=True)
        page.get_by_role("tab", name="Add a class").click()
        page.click("#undo")
        expect(page.locator("#said")).to_contain_text("Undone")
        expect(page.locator("#head")).to_contain_text("It knows 3 classes")
        page.click("#undo")
        expect(page.locator("body")).to_contain_text("there is nothing to undo")
        page.get_by_role("tab", name="History").click()  # where the error hides nothing
        expect(page.locator("#history")).not_to_contain_text("Error")
        browser.close()
    assert (keep / "app_add.png").stat().st_size > 10_000


def test_a_known_class_gets_more_photographs_only_if_that_is_said(model: Path, tmp_path: Path) -> None:
    from cofima.classifier.web.app import _changes

    session, red = Session(model), paint(tmp_path / "r", "red", 6, first=50)
    assert session.knows(" red ")
    assert not session.knows("yellow")
    with pytest.raises(CofimaError, match="already known, where only new classes are asked for: red"):
        session.add("red", red)
    assert len(session.history()) == 1
    done = session.add("red", red, more=True)
    assert (done.new, done.more) == ([], ["red"])
    named = [row[0] for row in _changes(done)]
    assert sorted(named) == sorted(set(named))  # measured before and after, and held out: one row
    assert {"red", "green", "blue"} <= set(named)


def test_half_a_photograph_is_named_by_its_own_name(model: Path, tmp_path: Path) -> None:
    whole = paint(tmp_path / "y", "yellow", 5)
    cut = tmp_path / "y" / "cut.png"
    cut.write_bytes(whole[0].read_bytes()[:2500])  # its header is whole
    assert not Limits().fault(cut)
    session = Session(model)
    with pytest.raises(CofimaError, match=r"what was uploaded has 1 problem:\n  cut.png: truncated"):
        session.add("yellow", [*whole, cut])
    for name in ("a\x1b[31m", "x" * 201, "\u202e"):
        with pytest.raises(CofimaError, match="cannot be the name of a class"):
            session.add(name, whole)
    (tmp_path / "y" / "gone.png").unlink(missing_ok=True)
    assert session.ask([tmp_path / "y" / "gone.png"])[0].error == "no longer kept: upload it again"


def test_no_name_is_markup_on_the_page() -> None:
    from cofima.classifier.web.app import _html

    for text in ("<img src=x>", "[a](javascript:b)", "$x$", "`a`", "**a**", "a | b", "# a", "\x1b[31m"):
        shown = _html(text)
        assert not set(shown) & set("<>[]()$`*|\x1b")
        assert html.unescape(shown) == text.replace("\x1b", r"\x1b")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_turns_other_sites_away_and_bounds_all_uploads(
    served: str, model: Path, tmp_path: Path
) -> None:
    httpx = pytest.importorskip("httpx")
    own = served.removeprefix("http://").rstrip("/")
    assert status(served, Host=own, Origin=f"http://{own}") == 200
    assert status(served, Host="evil.example") == 403
    assert status(f"{served}config", Host="evil.example:7860") == 403
    join = f"{served}gradio_api/queue/join"
    body = json.dumps({"data": [], "fn_index": 0, "session_hash": "x"}).encode()
    kind = {"Content-Type": "application/json"}
    assert status(join, body, Origin="http://evil.example", **kind) == 403
    assert status(join, body, Origin="null", **kind) == 403
    assert status(join, body, Host="evil.example", Origin="http://evil.example", **kind) == 403
    photo = paint(tmp_path / "p", "red", 1)[0]
    (tmp_path / "uploads" / "other").write_bytes(b"")
    os.truncate(tmp_path / "uploads" / "other", Limits.total_megabytes * 1_000_000)
    with photo.open("rb") as file:
        answer = httpx.post(f"{served}gradio_api/upload", files={"files": file})
    assert (answer.status_code, "all uploads together may take 2,000 MB" in answer.text) == (413, True)
    (tmp_path / "uploads" / "other").unlink()
    with photo.open("rb") as file:
        assert httpx.post(f"{served}gradio_api/upload", files={"files": file}).status_code == 200


@pytest.mark.slow
def test_the_command_removes_uploads_on_sigterm_and_after_a_kill(model: Path, tmp_path: Path) -> None:
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("gradio", reason="needs cofima[app]")
    photo, place = paint(tmp_path / "p", "red", 1)[0], tmp_path / "tmp"
    place.mkdir()
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = os.environ | {"TMPDIR": str(place), "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 143)):
        start = "import tiny; from cofima.cli.main import main; main()"  # with the tiny networks
        command = [sys.executable, "-c", start, "app", str(model)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as page:
            assert page.stdout is not None
            where = page.stdout.readline().split()[1]
            with photo.open("rb") as file:
                assert httpx.post(f"{where}gradio_api/upload", files={"files": file}).status_code == 200
            assert len(list(place.rglob("red0.png"))) == 1  # those of the killed page are gone already
            page.send_signal(number)
            assert page.wait(30) == code
        assert bool(list(place.rglob("*.png"))) == (number == signal.SIGKILL)
    assert not list(place.glob("cofima-app-*"))
