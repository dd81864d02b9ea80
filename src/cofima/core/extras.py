"""Packages that only some commands need."""

import warnings
from importlib import import_module
from typing import Any

from cofima.core.errors import CofimaError


def needed(package: str, extra: str) -> Any:
    """Return a package, or say which extra of cofima brings it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(package)
    except ImportError as error:
        raise CofimaError(
            f"this needs the package {package}: pip install 'cofima[{extra}]' ({error})"
        ) from error
