"""Write the tables of options into the pages, told from the code: ``python docs/tables.py``."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cofima import methods
from cofima.cli.catalog import options
from cofima.core.settings import uncounted
from cofima.data import sources
from cofima.data.stream import increments
from cofima.experiment.grid.cells import cells
from cofima.methods.components.cost import Plan
from cofima.models.registry import ALIASES
from cofima.store.config import Config

DOCS = Path(__file__).parent
VIT_B16 = 35.1e9  # floating-point operations of an image forward, as benchmarks/activations.py counts them
SUSTAINED = 50e12  # a second: what reproduce_table1.md assumes of a GPU
PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def tables() -> dict[str, str]:
    """Return every table by its name."""
    found = {name: _method(name) for name in methods.names()}
    found |= {"backbones": _backbones(), "roles": _roles(), "work": _work()}
    return found | {"configuration": _table("key", "values", list(_config(Config)))}


def fill(text: str) -> str:
    """Return a page with its tables as the code has them now."""
    current = tables()
    return PLACE.sub(lambda m: f"{m[1]}{current[m[2]]}{m[3]}", text)


def _method(name: str) -> str:
    rows = []
    for option in options(name):
        values, default = option.values.split(" | "), option.default
        if "number" in values and "none" in values:  # no value at all, which YAML writes as null
            values, default = [v.replace("none", "null") for v in values], default.replace("none", "null")
        meaning = option.meaning
        rows.append((f"options.{option.name}", _code(default), ", ".join(map(_code, values)), meaning))
    return _table("option", "values", rows) if rows else "It has no options of its own.\n"


def _work() -> str:
    """Count the work of each cell of Table 1 in the network; nothing of it is measured."""
    datasets = ["cub200", "cars196", "cifar100", "imagenet_r"]
    work: dict[str, dict[str, float]] = {}
    for cell in cells("table1.yaml", only=["seed=1993"]):
        known = sources.info(cell.dataset)
        train, test = max(known.variants.values())
        tasks = len(increments(known.classes, cell.stream.base_classes, cell.stream.increment))
        cost = methods.build(cell.method, cell.options).cost(Plan(cell.train.epochs, train, test, tasks))
        work.setdefault(methods.find(cell.method).label, {})[cell.dataset] = cost.work * VIT_B16
    work["all"] = {name: sum(row[name] for row in work.values()) for name in datasets}
    heads = ["method", *datasets, "sum", "hours", "hours, 3 seeds"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for label, row in work.items():
        total = sum(row.values())
        hours = total / SUSTAINED / 3600
        counts = " | ".join(f"{row[name] / 1e15:,.0f}" for name in datasets)
        lines.append(f"| {label} | {counts} | {total / 1e15:,.0f} | {hours:,.1f} | {3 * hours:,.0f} |")
    return "\n".join(lines) + "\n"


def _backbones() -> str:
    lines = ["| name | timm name | parameters | pre-trained on | remark |", "|---|---|---|---|---|"]
    for name, alias in ALIASES.items():
        facts = f"{alias.parameters:,} | {alias.pretraining}"
        lines.append(f"| `{name}` | `{alias.timm}` | {facts} | {alias.note} |")
    return "\n".join(lines) + "\n"


def _roles() -> str:
    """Return which settings may differ where; all others count everywhere."""
    uses = ("resumed", "named", "compared")
    free = {use: uncounted(Config, use) for use in uses}
    lines = ["| key | when a run is continued | for the name of a cell | in a report |", "|---|---|---|---|"]
    for key, *_ in _config(Config):
        said = ["free" if key in free[use] else "counts" for use in uses]
        lines += [f"| `{key}` | {' | '.join(said)} |"] if "free" in said else []
    return "\n".join(lines) + "\n"


def _config(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each key, those of parts by dotted names."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        key, default = prefix + name, field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from _config(type(default), f"{key}.")
            continue
        shown = _code("null" if default is None else "true" if default is True else str(default).lower())
        meaning = field.description or ""
        values = "keys and values" if isinstance(default, dict) else _values(schema["properties"][name])
        yield key, "by method" if isinstance(default, dict) else shown, values, meaning


def _values(schema: dict[str, Any]) -> str:
    """Say a JSON schema as a person would: ``whole number, at least 1``."""
    if "anyOf" in schema:
        return ", or ".join(_values(part) for part in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(_code, schema["enum"]))
    kinds = {"integer": "whole number", "boolean": "`true`, `false`", "null": "`null`", "array": "list"}
    kind = "path" if schema.get("format") == "path" else kinds.get(schema["type"], schema["type"])
    kind = "text" if kind == "string" else kind
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    bounds["exclusiveMaximum"] = "below"
    return kind + "".join(f", {word} {schema[bound]:g}" for bound, word in bounds.items() if bound in schema)


def _table(first: str, third: str, rows: list[tuple[str, str, str, str]]) -> str:
    lines = [f"| {first} | default | {third} | meaning |", "|---|---|---|---|"]
    for key, default, values, meaning in rows:
        plain = meaning.replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{key}` | {default} | {values} | {plain} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return text if text in ("number", "whole number", "list of whole numbers") else f"`{text}`"


if __name__ == "__main__":
    for page in sorted(DOCS.rglob("*.md")):
        page.write_text(fill(page.read_text("utf-8")), "utf-8")
