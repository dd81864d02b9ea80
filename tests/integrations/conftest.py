"""Tests of other frameworks: those that are slow are not even imported where they do not run."""

from pathlib import Path

import pytest

FRAMEWORKS = {"test_transformers.py", "test_lightning.py", "test_avalanche.py"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose import takes seconds in every process, if all of their tests are deselected."""
    unwanted = collection_path.name in FRAMEWORKS and "not slow" in config.getoption("markexpr")
    return True if unwanted else None
