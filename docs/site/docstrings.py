"""Docstrings for the site: roles and formulas as reStructuredText writes them become Markdown."""

import re
import textwrap
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?([^`]+)`")
FORMULA = re.compile(r":math:`([^`]+)`")
BLOCK = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +.*|[ ]*(?=\n\1 +)))*)", re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return a docstring with its roles as code, and its formulas between dollars."""
    text = BLOCK.sub(lambda m: f"{m[1]}$$\n{textwrap.indent(_joined(m[2]), m[1])}\n{m[1]}$$", text)
    return ROLE.sub(r"`\1`", FORMULA.sub(lambda m: f"${m[1]}$", text))


def _joined(body: str) -> str:
    return "\n".join(line.strip() for line in body.splitlines() if line.strip())
