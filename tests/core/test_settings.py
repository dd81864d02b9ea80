"""Roles of settings: which may differ in a resumed run, in a cell's name, and between compared runs."""

from typing import Annotated

import pytest
from pydantic import BaseModel

from cofima.core.settings import MACHINE, RECORDED, SOURCE, Role, uncounted
from cofima.store.config import Config


class Inner(BaseModel):
    plain: int = 0
    file: Annotated[str, SOURCE] = ""


class Outer(BaseModel):
    inner: Inner = Inner()
    where: Annotated[str | None, MACHINE] = None
    seen: Annotated[int, RECORDED] = 0
    always: Annotated[int, Role()] = 0


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("resumed", {"inner.file", "where"}),
        ("named", {"where"}),
        ("compared", {"inner.file", "where", "seen"}),
    ],
)
def test_roles_are_read_from_the_fields_of_all_parts(where: str, expected: set[str]) -> None:
    assert uncounted(Outer, where) == expected


def test_what_does_not_name_a_cell_is_neither_compared_nor_held_against_a_run_that_continues() -> None:
    named, resumed, compared = (uncounted(Config, where) for where in ("named", "resumed", "compared"))
    assert named == {"device", "keep_checkpoints", "data.root"}
    assert named < resumed < compared
    # the effect of these is not checked again when a run continues
    assert not {"seed", "model.checkpoint", "data.preset", "dataset", "backbone"} & resumed
