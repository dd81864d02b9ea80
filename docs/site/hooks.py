"""Hooks of the documentation site: navigation, pages from outside of docs/, links, math without a network.

The pages are written to be read in the repository: their links are relative to it, and the lists of
docs/README.md are the table of contents. Here they are fitted to the site.
"""

import html
import posixpath
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
INDEX = "README.md"
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#]+\.md)\)", re.MULTILINE)
WIDE = ("paper.md", "fidelity.md")  # tables of four and five columns: they get the room of the contents, too
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
MARK = re.compile(r"(?<=[A-Za-z0-9_])([/:._=])(?=[A-Za-z0-9_])")  # in the middle of a path or a dotted name
SCRIPTS = ("msub", "msup", "msubsup")
MATHML = "http://www.w3.org/1998/Math/MathML"
MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: Any) -> Any:
    """Take the navigation from the lists of docs/README.md: one section for each list."""
    text = (ROOT / "docs" / INDEX).read_text("utf-8")
    lists = [found for part in re.split(r"\n\n(?=\S)", text) if (found := ENTRY.findall(part))]
    titles = ("Tutorials", "Reference", "Methods", "Python")
    nav: list[Any] = [{"Home": INDEX}]
    for title, entries in zip(titles, lists, strict=True):
        nav.append({title: [{name: page} for name, page in entries]})
    benchmarks = [{_title(path): f"benchmarks/{path.name}"} for path in _benchmarks()]
    nav.append({"Measurements": benchmarks})
    nav.append({"Project": [{"Contributing": "CONTRIBUTING.md"}, {"Changes": "CHANGELOG.md"}]})
    config["nav"] = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand beside docs/ in the repository."""
    for path in [*_benchmarks(), *(ROOT / name for name in OUTSIDE)]:
        address = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fit the links of a page to the site; those to files that are no page become plain text."""
    here = page.file.src_uri
    if here in WIDE:
        page.meta["hide"] = ["toc"]
    inside = (ROOT / "docs" / here).is_file()
    home = posixpath.dirname(f"docs/{here}" if inside else here)

    def fit(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        place = posixpath.normpath(posixpath.join(home, target))
        address = place.removeprefix("docs/") if place.startswith("docs/") else place
        if files.get_file_from_path(address) is None:
            return text
        return f"[{text}]({posixpath.relpath(address, posixpath.dirname(here) or '.')}{anchor})"

    # comments that mark generated tables would swallow the tables themselves
    markdown = re.sub(r"^<!-- (table: \S+|end) -->$", "", markdown, flags=re.MULTILINE)
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):  # examples stay as they are
        parts += [LINK.sub(fit, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(fit, markdown[end:])])


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML, which browsers draw without a script, and let long names in tables break."""
    content = CELL.sub(lambda cell: CODE.sub(_breakable, cell[0]), content)
    return MATH.sub(lambda m: _mathml(html.unescape(m[2]).strip(), block=m[1] == "div"), content)


def _breakable(match: re.Match[str]) -> str:
    """Let a path or a dotted name break after its marks, and nowhere else."""
    return MARK.sub(r"\1<wbr>", match[0])


def _mathml(formula: str, *, block: bool) -> str:
    formula = re.sub(r"\\arg(?![a-z])", r"\\operatorname{arg}", formula)  # which the converter does not know
    made = _tight(convert(formula, display="block" if block else "inline"))
    return f'<div class="formula">{made}</div>' if block else made


def _tight(formula: str) -> str:
    """Set signs in indices without space around them, and stars on the axis, as TeX does."""
    ElementTree.register_namespace("", MATHML)
    tree = ElementTree.fromstring(formula)
    for script in (node for name in SCRIPTS for node in tree.iter(f"{{{MATHML}}}{name}")):
        for sign in (sign for part in list(script)[1:] for sign in part.iter(f"{{{MATHML}}}mo")):
            sign.set("lspace", "0")
            sign.set("rspace", "0")
            sign.text = "∗" if sign.text == "*" else sign.text
    return ElementTree.tostring(tree, encoding="unicode")


def _benchmarks() -> list[Path]:
    return sorted(path for path in (ROOT / "benchmarks").glob("*.md") if ".head." not in path.name)


def _title(path: Path) -> str:
    return path.read_text("utf-8").splitlines()[0].lstrip("# ").replace("`", "")
