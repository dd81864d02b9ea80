"""Other packages: those that only some commands need, and the versions that are installed."""

import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

from cofima.core.errors import CofimaError

installed_version = cache(version)  # which looks into files; every task that is written asks for four


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
