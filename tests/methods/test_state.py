"""The schema of a method's state: its laws, and that every method's state is what it declares."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.methods.base import Method
from cofima.methods.components.discriminant import DISCRIMINANT
from cofima.methods.components.gaussians import ClassGaussians, pool_rows
from cofima.methods.state import Entry, check, declared, drop_row, place_of, remove_class, tagged, untagged

SIZES = [2, 1, 2]
EACH = torch.tensor([2, 0, 3, 1, 1])  # rows of each class, where it is not one
# beside every method as it is, which tests/methods/test_contract.py looks at
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("coma", {"lam": "auto"}),
    ("cofima", {"variant": "authors"}),
    ("cofima", {"fisher_history": "accumulate"}),
    ("ewc", {"form": "separate"}),
    ("weight_ensemble", {"init": "previous"}),
    ("wise_ft", {"merge_first": False}),
    ("ranpac", {"petl": "none"}),
    ("slca", {"classifier": "lda"}),
    ("cofima", {"classifier": "lda"}),
    ("slca", {"classifier": "ridge", "closed_form": {"projection": 24}}),
]


@dataclass(eq=False)
class Mine(Method):
    """A method with one entry of each kind."""

    label: ClassVar[str] = "Mine"
    state_schema: ClassVar[tuple[Entry, ...]] = (
        Entry("rows", axis="class"),
        Entry("columns", axis="class", dim=1),
        Entry("fisher.", axis="weight", merge="sum"),
        Entry("other.", merge="last"),
        Entry("examples", axis="class", lengths="each"),
        Entry("each", axis="class"),
        Entry("group.", axis="class", lengths="sizes", ragged="parts"),
    )


def mine() -> dict[str, Tensor]:
    numbers = torch.arange(5.0)
    return {
        "rows": numbers.repeat(3, 1).T.contiguous(),
        "columns": numbers.repeat(3, 1),
        "fisher.backbone.head.blocks.1.weight": torch.ones(1, 4),  # not of the network's head
        "fisher.head.blocks.0.weight": numbers[:2, None],
        "fisher.head.blocks.1.weight": numbers[2:3, None],
        "fisher.head.blocks.2.weight": numbers[3:, None],
        "other.value": torch.tensor(7),
        "each": EACH,
        "examples": numbers.repeat_interleave(EACH)[:, None],
        "group.sizes": EACH,
        "group.parts": numbers.repeat_interleave(EACH)[:, None],
        "group.first": numbers,
    }


@pytest.mark.parametrize("label", range(5))
def test_a_class_is_taken_out_of_all_that_has_one_row_of_it(label: int) -> None:
    left = remove_class(Mine, mine(), SIZES, label)
    others = [float(number) for number in range(5) if number != label]
    assert left["rows"][:, 0].tolist() == others
    assert left["columns"][0].tolist() == others
    assert left["columns"].is_contiguous()
    blocks = torch.cat([left[f"fisher.head.blocks.{block}.weight"] for block in range(3)])
    assert blocks[:, 0].tolist() == others
    examples = [float(number) for number in range(5) for _ in range(int(EACH[number])) if number != label]
    for key in ("examples", "group.parts"):
        assert left[key][:, 0].tolist() == examples
    assert left["group.first"].tolist() == others
    for key in ("fisher.backbone.head.blocks.1.weight", "other.value"):
        assert torch.equal(left[key], mine()[key])
    sizes = list(SIZES)
    sizes[place_of(label, SIZES)[0]] -= 1
    check(Mine, left, sizes)


def test_the_order_in_which_classes_are_taken_out_does_not_matter() -> None:
    one = remove_class(Mine, remove_class(Mine, mine(), [2, 1, 2], 3), [2, 1, 1], 0)
    two = remove_class(Mine, remove_class(Mine, mine(), [2, 1, 2], 0), [1, 1, 2], 2)
    assert all(torch.equal(one[key], two[key]) for key in mine())


@pytest.mark.parametrize(
    "act", [lambda state: remove_class(Mine, state, SIZES, 0), lambda s: declared(Mine, s)]
)
def test_what_is_not_declared_is_refused_in_one_sentence(act: Any) -> None:
    with pytest.raises(CofimaError, match=r"Mine keeps 'prototypes'.*not in the state_schema") as error:
        act(mine() | {"prototypes": torch.zeros(5, 3)})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("rows", (4, 3)),
        ("rows", ()),
        ("columns", (5,)),
        ("columns", (5, 3)),
        ("fisher.head.blocks.1.weight", (2, 1)),
        ("fisher.head.blocks.3.weight", (1, 1)),
    ],
)
def test_an_axis_that_does_not_count_classes_is_refused(key: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(CofimaError, match=f"Mine keeps '{key}' of shape"):
        remove_class(Mine, mine() | {key: torch.zeros(shape)}, SIZES, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"each": torch.tensor([2, 0, 3, 1, 2])}, "that counts 8"),
        ({"each": torch.tensor([2, -1, 4, 1, 1])}, "is torch.int64"),
        ({"each": torch.tensor([2.0, 0, 3, 1, 1])}, "is torch.float32"),
        ({"each": None}, "is not there"),
        ({"group.parts": torch.zeros(6, 1)}, "that counts 7"),
    ],
)
def test_rows_that_are_not_those_counted_are_refused(change: dict[str, Tensor | None], reason: str) -> None:
    state = {key: value for key, value in (mine() | change).items() if value is not None}
    with pytest.raises(
        CofimaError, match=f"Mine keeps '(examples|group.parts)' of shape .*{reason}"
    ) as error:
        remove_class(Mine, state, SIZES, 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a", "merge": "pool"},
        {"name": "a.", "axis": "class", "merge": "pool"},
        {"name": "a", "merge": "pool", "pool": pool_rows},
        {"name": "a", "axis": "class", "pool": pool_rows},
        {"name": "a", "axis": "weight"},
        {"name": "a", "dim": 1},
        {"name": "a", "lengths": "b"},
        {"name": "a", "axis": "class", "lengths": "b", "dim": 1},
        {"name": "a", "axis": "class", "lengths": "b", "merge": "average"},
        {"name": "a", "axis": "class", "lengths": "b", "merge": "pool", "pool": pool_rows},
        {"name": "a", "axis": "class", "lengths": "b", "ragged": "a"},
        {"name": "a.", "axis": "class", "lengths": "b"},
        {"name": "a.", "axis": "class", "ragged": "b"},
        {"name": "a.", "axis": "class", "lengths": "b", "ragged": "c", "merge": "sum"},
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=wrong["name"]):
        Entry(**wrong)


def test_an_entry_that_two_declarations_cover_is_refused() -> None:
    class Twice(Mine):
        state_schema = (*Mine.state_schema, Entry("other.value"))

    with pytest.raises(CofimaError, match="twice in"):
        declared(Twice, ["other.value"])


def test_groups_come_back_under_their_own_names() -> None:
    group = {"a": torch.zeros(1), "b.c": torch.ones(2)}
    state = tagged("x", group) | {"xy.a": torch.zeros(3), "a": torch.zeros(4)}
    back = untagged("x", state)
    assert back.keys() == group.keys()
    assert all(torch.equal(back[key], group[key]) for key in group)


def test_a_row_is_dropped_from_any_dimension() -> None:
    values = torch.arange(24).reshape(2, 3, 4)
    for dim in range(3):
        for row in range(values.shape[dim]):
            keep = [at for at in range(values.shape[dim]) if at != row]
            assert torch.equal(drop_row(values, row, dim), values.index_select(dim, torch.tensor(keep)))


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_the_state_of_a_variant_is_what_its_method_declares(
    name: str, options: dict[str, Any], tiny: Any
) -> None:
    stream = tiny.stream((2, 1, 2), per_class=6)
    model = tiny.model(tiny.config(name, train={"epochs": 1}, options=options), stream)
    kind, sizes, used = type(model.method), list[int](), set[str]()
    for task in model.method.stream(stream):
        model.method.learn(task)
        sizes.append(len(task.classes))
        state = model.method.state()
        used |= {entry.name for entry in check(kind, state, sizes).values()}
    assert used | ({"start."} if options == {"init": "previous"} else set()) == {
        entry.name for entry in model.method.entries()
    }
    assert set(model.method.entries()) <= set(kind.state_schema)
    left = remove_class(kind, state, sizes, 1)
    check(kind, left, [sizes[0] - 1, *sizes[1:]])
    assert left.keys() == state.keys()


def test_a_generic_method_is_chosen_by_what_is_left_of_the_state() -> None:
    assert methods.fallback_for({"raw_head.", "gaussians.", "fisher."}) == ("slca", {})
    assert methods.fallback_for({"raw_head.", "fisher."}) == ("seq_ft", {})
    assert methods.fallback_for(()) == ("seq_ft", {})
    shared = {"raw_head.", *(entry.name for entry in DISCRIMINANT)}
    assert methods.fallback_for(shared) == ("slca", {"classifier": "lda"})


def test_pooled_rows_are_the_gaussian_of_all_images() -> None:
    seen = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    whole, parts = ClassGaussians(), ClassGaussians()
    whole.add(seen)
    for part in (seen[:25], seen[25:]):
        parts.add(part)
    state = parts.state()
    rows = torch.split(state["rows"], state["ranks"].tolist())
    pooled = pool_rows(
        [{key: value[row] for key, value in state.items()} | {"rows": rows[row]} for row in range(2)]
    )
    for key, value in whole.state().items():
        assert pooled[key].dtype == value.dtype
        torch.testing.assert_close(pooled[key], value if key == "rows" else value[0], rtol=1e-4, atol=1e-4)
