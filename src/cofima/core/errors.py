"""User-facing errors and warnings."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class CofimaError(Exception):
    """Error that the user can fix: shown as one message without a traceback, with exit code 2."""


class CofimaWarning(UserWarning):
    """Warning for the user; work continues."""


def problems(where: str, found: Sequence[str]) -> CofimaError:
    """Build one error that lists every problem found at ``where``."""
    count = f"{len(found)} problem{'s' if len(found) != 1 else ''}"
    return CofimaError(f"{where} has {count}:\n" + "\n".join(f"  {line}" for line in found))


def first_problems(where: str, found: Sequence[str], shown: int = 20) -> CofimaError:
    """Build one error that lists the first problems found at ``where``, and counts the rest."""
    lines = str(problems(where, found)).split("\n")
    more = [f"  ... and {len(found) - shown} more"] if len(found) > shown else []
    return CofimaError("\n".join(lines[: 1 + shown] + more))


def file_error(path: object, error: OSError) -> CofimaError:
    """Build the error for a file or folder that cannot be read or written."""
    return CofimaError(f"{path}: {(error.strerror or str(error)).lower()}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'lam'?``, or the known names if none is close."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}" if names else ""
