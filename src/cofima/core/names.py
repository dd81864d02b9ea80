"""Untrusted names and texts: escaping for display, and validation before they are stored."""

import json
import unicodedata
from typing import Any

LONGEST = 200  # characters of a class name
# invisible characters that change the direction of surrounding text, or break a line
_INVISIBLE = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def is_control(char: str) -> bool:
    """Return True for a character that changes the display of the text around it."""
    return unicodedata.category(char) in ("Cc", "Cs") or char in _INVISIBLE


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Return text with control characters escaped: ``\x1b``, ``\u202e``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(char) if is_control(char) and char not in keep else char for char in text)


def json_line(value: Any) -> str:
    """Return a value as one line of JSON, readable in any script, without control characters."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(f"\\u{ord(char):04x}" if is_control(char) else char for char in text)


def name_fault(name: str) -> str:
    """Return why a class cannot have this name, or an empty string if it can."""
    if not name.strip():
        return "the name is empty"
    if any(map(is_control, name)):
        return "the name has control characters in it"
    return f"{len(name)} characters are more than {LONGEST}" if len(name) > LONGEST else ""


def shortened(text: str, most: int = 80) -> str:
    """Return a printable text on one line, truncated to ``most`` characters."""
    line = printable(text[: most + 1], keep="").strip()
    return line if len(text) <= most else f"{line[:most]}... ({len(text):,} characters)"


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
