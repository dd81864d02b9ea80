"""Pickles are read as plain data: nothing in them can run."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from cofima.data.sources.unpickle import plain_dict

VALUES = {
    "data": np.arange(6000, dtype=np.uint8).reshape(300, 20),
    "fine_labels": [0, 255, 256, 70000],
    "filenames": ["a.png", "b.png"],
    "batch_label": "training batch 1 of 1",
}


def same(found: dict[str, object], expected: dict[str, object]) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[key], value) if isinstance(value, np.ndarray) else found[key] == value
        for key, value in expected.items()
    )


def test_what_python_2_wrote(old_pickle) -> None:
    content = old_pickle(VALUES)
    assert same(plain_dict(content), VALUES)
    assert same(pickle.loads(content, encoding="latin1"), VALUES)  # the oracle


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_python_3_writes(protocol: int, order: str) -> None:
    values = VALUES | {"data": np.asarray(VALUES["data"], order=order)}
    assert same(plain_dict(pickle.dumps(values, protocol)), VALUES)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_code_is_refused_and_does_not_run(protocol: int, tmp_path: Path) -> None:
    content = pickle.dumps({"data": Evil(tmp_path / "ran")}, protocol)
    with pytest.raises(ValueError, match=r"posix.system, which plain data do not need"):
        plain_dict(content)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()], dtype=object),
        np.zeros(3, dtype=np.float32),
        np.zeros(3, dtype=[("a", "u1")]),
        {"a": complex(1, 2)},
        Path("x"),
    ],
)
def test_arrays_of_other_things_are_refused(value: object) -> None:
    try:
        content = pickle.dumps({"data": value}, 2)
    except (pickle.PicklingError, TypeError):  # pragma: no cover
        pytest.skip("cannot be pickled here")
    with pytest.raises(ValueError, match=r"not of bytes|plain data do not need"):
        plain_dict(content)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x80\x02}", pickle.dumps([1, 2]), pickle.dumps(VALUES)[:900]]
)
def test_damaged_pickles_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - what the reader says of damage is its own
        plain_dict(content)
