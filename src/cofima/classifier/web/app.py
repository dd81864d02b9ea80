"""The web page of a model: predict images, add a class, undo, show the history."""

import os
import string
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cofima.classifier.learn import Extension
from cofima.classifier.predict import Prediction
from cofima.classifier.web.guard import Guard
from cofima.classifier.web.session import Session
from cofima.core.errors import CofimaError
from cofima.core.extras import import_extra
from cofima.core.names import printable
from cofima.core.progress import Progress
from cofima.report.history import TITLES, history_table

T = TypeVar("T")
# files of any type: the session reports a file that is not an image, while the browser would silently drop it
UPLOAD: dict[str, Any] = {"file_count": "multiple", "height": 220}
ANSWERS = {"image": "20%", "answer": "22%", "probability": "18%", "nearest classes": "40%"}  # column widths
STYLE = "#gallery .grid-wrap { max-height: none; }"  # gradio would show one and a half rows, and scroll
CHANGES = ["class", "before %", "after %", "change"]


class BrowserProgress(Progress):
    """Progress of long-running work as a bar on the page."""

    def __init__(self, bar: Callable[..., Any]) -> None:
        self.bar, self.label = bar, ""

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """Yield ``items`` and advance the bar."""
        shown = f"{self.label} · {label}" if self.label else label
        for done, item in enumerate(items):
            self.bar((done, total), desc=shown)
            yield item
        self.bar((total, total), desc=shown)

    def say(self, message: str) -> None:
        """Show a message in place of the bar."""
        self.bar(None, desc=message)

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        """Prefix the label of each bar with the stage."""
        self.label = label
        try:
            self.say(label)
            yield
        finally:
            self.label = ""


def build(session: Session) -> Any:
    """Build the page of a model, without serving it."""
    gradio = import_extra("gradio", "app")
    page = gradio.Blocks(
        title=f"cofima: {session.folder.name}", analytics_enabled=False, delete_cache=(600, 3600)
    )
    with page:
        head = gradio.Markdown(_head(session), elem_id="head")
        with gradio.Tab("Ask"):
            asked = gradio.File(label="Drop images here", elem_id="asked", **UPLOAD)
            ask = gradio.Button("Name the classes", variant="primary", elem_id="ask")
            gallery = gradio.Gallery(
                label="Answers",
                columns=4,
                height="auto",
                object_fit="contain",
                interactive=False,
                elem_id="gallery",
            )
            answers = gradio.Dataframe(
                headers=list(ANSWERS),
                column_widths=list(ANSWERS.values()),
                interactive=False,
                wrap=True,
                max_height=10_000,
                elem_id="answers",
            )
        with gradio.Tab("Add a class"):
            name = gradio.Textbox(label="Name of the new class", max_lines=1, elem_id="name")
            label = "Drop a few photographs of it, ten or more if you can"
            photos = gradio.File(label=label, elem_id="photos", **UPLOAD)
            with gradio.Row():
                add = gradio.Button("Learn it", variant="primary", elem_id="add")
                undo = gradio.Button("Undo the last change", elem_id="undo")
            with gradio.Column(visible=False) as confirm:
                question = gradio.Markdown(elem_id="confirm")
                with gradio.Row():
                    sure = gradio.Button("Add them to it", variant="primary", elem_id="sure")
                    unsure = gradio.Button("No, leave it as it is", elem_id="unsure")
            said = gradio.Markdown(min_height=90, elem_id="said")  # room for the progress bar
            changes = gradio.Dataframe(
                headers=CHANGES, interactive=False, wrap=True, max_height=10_000, elem_id="changes"
            )
        with gradio.Tab("History"):
            history = gradio.Dataframe(
                _history(session), headers=list(TITLES), interactive=False, wrap=True, elem_id="history"
            )
        state = [head, said, changes, history]
        form = [name, photos, confirm, question]

        def answer(files: list[str] | None) -> tuple[Any, Any]:
            found = _shown(gradio, lambda: session.ask([Path(file) for file in files or []]))
            good = [(one.image, _caption(one)) for one in found if not one.error]
            return good, [_row(one) for one in found]

        def teach(title: str, files: list[str] | None, bar: Any, more: bool) -> tuple[Any, ...]:
            paths = [Path(file) for file in files or []]
            done = _shown(gradio, lambda: session.add(title, paths, BrowserProgress(bar), more=more))
            shown = _head(session), _said(done, title.strip()), _changes(done), _history(session)
            return (*shown, "", None, gradio.update(visible=False), "")

        def learn(title: str, files: list[str] | None, bar: Any = gradio.Progress()) -> tuple[Any, ...]:  # noqa: B008
            if files and _shown(gradio, lambda: session.knows(title)):
                known = f"**{_html(title.strip())}** is known already. Add the photographs to it?"
                return (*[gradio.skip()] * (len(state) + 2), gradio.update(visible=True), known)
            return teach(title, files, bar, more=False)

        def learn_more(title: str, files: list[str] | None, bar: Any = gradio.Progress()) -> tuple[Any, ...]:  # noqa: B008
            return teach(title, files, bar, more=True)

        def go_back() -> tuple[Any, ...]:
            now = _shown(gradio, session.undo)
            return _head(session), f"Undone: the model is as it was in state {now}.", [], _history(session)

        ask.click(answer, asked, [gallery, answers], api_visibility="private")
        for button, work in ((add, learn), (sure, learn_more)):
            button.click(
                work,
                [name, photos],
                [*state, *form],
                api_visibility="private",
                concurrency_limit=None,  # a second user is told at once that the model is being changed
                show_progress_on=[said],
            )
        unsure.click(lambda: gradio.update(visible=False), None, confirm, api_visibility="private")
        undo.click(go_back, None, state, api_visibility="private", show_progress_on=[said])
        page.load(
            lambda: (_head(session), _history(session)), None, [head, history], api_visibility="private"
        )
    return page


def serve(
    session: Session, uploads: Path, host: str, port: int | None, names: Collection[str] = ()
) -> tuple[Any, str]:
    """Serve the page in background threads; return it and its URL.

    Args:
        session: The model in use.
        uploads: An empty folder for uploaded files; no other files can be read through the page.
        host: Address to listen on; 127.0.0.1 is reachable from this machine only.
        port: Port; by default the first free one from 7860.
        names: Other host names under which the page is reached, such as behind a proxy.
    """
    from starlette.middleware import Middleware  # installed with gradio

    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    page = build(session)
    most = session.limits.total_megabytes * 1_000_000
    guard = Middleware(Guard, host=host, names=names, uploads=uploads, most=most)
    try:
        _, where, _ = page.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            inbrowser=False,
            prevent_thread_lock=True,
            show_error=False,
            footer_links=[],
            allowed_paths=[],
            blocked_paths=[str(session.folder.resolve())],
            max_file_size=session.limits.megabytes * 1_000_000,
            ssr_mode=False,
            enable_monitoring=False,
            app_kwargs={"middleware": [guard]},
            css=STYLE,
        )
    except OSError as error:
        raise CofimaError(f"the page cannot be served on {host}: {error}") from error
    return page, str(where)


def _shown(gradio: Any, work: Callable[[], T]) -> T:
    """Run ``work``; show a :class:`CofimaError` as a message on the page."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    except CofimaError as error:
        raise gradio.Error(_html(str(error)), duration=20, print_exception=False) from error


def _head(session: Session) -> str:
    classifier = session.classifier
    known = classifier.classes
    names = ", ".join(_html(name) for name in known[:40]) + (", ..." if len(known) > 40 else "")
    return f"# {_html(session.folder.resolve().name)}\n\nIt knows {len(known)} classes: {names}"


def _caption(one: Prediction) -> str:
    name, chance = one.best[0]
    return f"unknown (nearest: {name})" if one.unknown else f"{name} {100 * chance:.0f} %"


def _row(one: Prediction) -> list[str]:
    name = Path(one.image).name
    if one.error:
        return [name, f"error: {one.error}", "", ""]
    nearest = ", ".join(f"{other} {100 * chance:.1f} %" for other, chance in one.best)
    return [name, one.label, f"{100 * one.probability:.1f} %", nearest]


def _said(done: Extension, name: str) -> str:
    accuracy = done.accuracy.percent
    known = "" if accuracy is None else f", {accuracy:.0f} % right on images that it had not seen"
    what = f"Learned **{_html(name)}** from {done.train_images} images{known}."
    if done.old is None:
        return f"{what} What this cost the other classes is not known."
    before, after = done.old.before.mean_of_classes, done.old.after.mean_of_classes
    return (
        f"{what} The other classes: {before:.1f} % before, {after:.1f} % after ({_html(done.old.rests_on)})."
    )


def _changes(done: Extension) -> list[list[str]]:
    """Return a table row per class: accuracy before and after for old classes, current for others."""
    rows = {}
    for name, now in done.accuracy.by_class.items():
        rows[name] = [name, "new" if name in done.new else "", f"{now:.1f}", ""]
    if done.old is not None:
        before, after = done.old.before.by_class, done.old.after.by_class
        for name in before:
            change = f"{after[name] - before[name]:+.1f}"
            rows[name] = [name, f"{before[name]:.1f}", f"{after[name]:.1f}", change]
    return list(rows.values())


def _history(session: Session) -> list[list[str]]:
    return [[str(cell) for cell in row.cells] for row in history_table(session.history()).rows]


def _html(text: str) -> str:
    """Escape text for a page that renders Markdown, HTML and formulas: all punctuation becomes entities."""
    return printable(text).translate(_CODES)


_CODES = {ord(mark): f"&#{ord(mark)};" for mark in string.punctuation} | {ord("\n"): "<br>"}
