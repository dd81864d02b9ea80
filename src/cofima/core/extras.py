"""Optional packages, which only some commands need."""

import warnings
from importlib import import_module
from typing import Any

from cofima.core.errors import CofimaError


def import_extra(package: str, extra: str) -> Any:
    """Import an optional package; the error names the extra of cofima that installs it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(package)
    except ImportError as error:
        raise CofimaError(
            f"this needs the package {package}: pip install 'cofima[{extra}]' ({error})"
        ) from error
