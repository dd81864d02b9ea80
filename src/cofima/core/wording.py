"""Formatting of numbers and lists in messages."""

from collections.abc import Sequence


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun: ``1 image``, ``2 images``."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def some(names: Sequence[str], most: int = 8) -> str:
    """Return the first names, and the number of those omitted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
