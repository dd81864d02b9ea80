"""What a method's options are, told from its code: names, defaults, values, meaning."""

import re
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from cofima import methods
from cofima.methods import Method


@dataclass(frozen=True)
class Option:
    """One option, by its dotted name."""

    name: str
    default: str
    values: str
    meaning: str


def options(method: str) -> list[Option]:
    """Return the options of a method, those of its parts by dotted names."""
    made = methods.build(method)
    hints, meanings = get_type_hints(type(made), include_extras=True), _meanings(type(made))
    found: list[Option] = []
    for field in fields(made):
        value = getattr(made, field.name)
        if isinstance(value, BaseModel):
            found += _nested(value, f"{field.name}.")
        else:
            found.append(
                Option(field.name, _text(value), values(hints[field.name]), meanings.get(field.name, ""))
            )
    return found


def summary(kind: type[Method]) -> str:
    """Return the first sentence about a method."""
    return (kind.__doc__ or "").strip().splitlines()[0]


def values(hint: Any) -> str:
    """Say a type as a person would: ``number | auto``, ``last | accumulate``."""
    origin = get_origin(hint)
    if origin is Annotated:
        return values(get_args(hint)[0])
    if origin in (Union, UnionType):
        return " | ".join(values(part) for part in get_args(hint))
    if origin is tuple:
        return f"list of {values(get_args(hint)[0])}s"
    if origin is Literal:
        return " | ".join(map(str, get_args(hint)))
    return {int: "whole number", float: "number", bool: "true | false", NoneType: "none"}.get(hint, str(hint))


def _nested(owner: BaseModel, prefix: str) -> list[Option]:
    hints = get_type_hints(type(owner), include_extras=True)
    return [
        Option(prefix + name, _text(getattr(owner, name)), values(hints[name]), field.description or "")
        for name, field in type(owner).model_fields.items()
    ]


def _meanings(kind: type[Method]) -> dict[str, str]:
    """Read the ``Args:`` of a method's docstring and of those that it builds on."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        _, _, listed = (owner.__doc__ or "").partition("Args:\n")
        for name, text in re.findall(r"^ {8}(\w+): (.*(?:\n {9,}.*)*)", listed, re.MULTILINE):
            found[name] = " ".join(text.split()).replace("``", "")
    return found


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return "none" if value is None else str(value)
