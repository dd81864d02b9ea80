"""Optional packages, and installed versions."""

import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

from cofima.core.errors import CofimaError

installed_version = cache(version)  # it reads files, and every task that is written needs four versions


def import_extra(package: str, extra: str) -> Any:
    """Import an optional package; the error message names the extra of cofima that installs it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(package)
    except ImportError as error:
        raise CofimaError(
            f"this needs the package {package}: pip install 'cofima[{extra}]' ({error})"
        ) from error
