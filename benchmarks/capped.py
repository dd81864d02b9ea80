"""Three datasets of the paper, capped, in ten tasks: writes benchmarks/CAPPED.md.

The images are folders cifar100, cars196 and cub200 below COFIMA_DATA. Run it again to continue; what finished
cells measured is kept in benchmarks/capped.jsonl, capped_search.jsonl and capped_layers.jsonl, one line each:

    COFIMA_DATA=/where/they/are python benchmarks/capped.py --search [--jobs 2] [--only KEY=VALUE]
    COFIMA_DATA=/where/they/are python benchmarks/capped.py --layers [--jobs 2] [--only KEY=VALUE]
    COFIMA_DATA=/where/they/are python benchmarks/capped.py [--jobs 2] [--only seed=1993] [--collect]
"""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))

import oracles
import study
from cofima.report.groups import Group

HERE = Path(__file__).parent
STUDY, SEARCH = HERE / "capped.jsonl", HERE / "capped_search.jsonl"
LAYERS = HERE / "capped_layers.jsonl"
FORMER = HERE / "capped_search_former.jsonl"  # before the rule of the discriminant's shrinkage changed

LOST = """After the last task the head is replaced by heads that have seen the images of all tasks, which
a method without old images may not do (`python benchmarks/oracles.py RUN ...`). From one column to the next:
the cost of stale statistics, and of the kind of head. From a row to that of Joint, in one column:
that of the backbone."""


def _is_frozen(row: Group) -> bool:
    """Return True for the discriminant on the last layer of the frozen backbone."""
    return row.label.startswith("SLDA") and row.runs[0].config["model"].get("layers", "last") == "last"


def _is_chosen(row: Group) -> bool:
    """Return True for CoFiMA as chosen on held-out images, each dataset with its features."""
    config = row.runs[0].config
    features = (
        config["model"].get("layers", "last"),
        config["options"].get("closed_form", {}).get("features"),
    )
    wanted = ("last", "power") if config["dataset"] == "folder:cub200" else ("all", "raw")
    return (
        row.label.startswith("CoFiMA") and config["options"].get("classifier") == "lda" and features == wanted
    )


SLDA = study.Gap("over SLDA", _is_frozen)
CHOSEN = study.Gap("chosen CoFiMA over it", _is_chosen, -1)


def tables(file: Path, gaps: Sequence[study.Gap] = (SLDA,)) -> Iterable[str]:
    """Yield a table for each dataset and backbone, the upper bound first, then from the best row down."""
    if not file.is_file():
        return
    found = study.compared(file, gaps, study.standard_error)
    for members, lines in found:
        name, size = members[0].dataset.removeprefix("folder:"), members[0].record.preprocess["size"]
        yield f"\n### {name}, {members[0].backbone}, {size} px\n"
        yield from lines


def page() -> str:
    """Return CAPPED.md: the results, and every setting that was tried, below what it says of itself."""
    parts = [
        (HERE / "capped.head.md").read_text("utf-8").rstrip(),
        "\n## Test images",
        *tables(STUDY, (SLDA, CHOSEN)),
    ]
    if lost := list(oracles.tables()):
        parts += ["\n## Where the points are lost\n", LOST, *lost]
    parts += ["\n## Every setting tried, on held-out training images of seed 1993", *tables(SEARCH)]
    parts += ["\n## Features of all layers, on held-out training images of seed 1993", *tables(LAYERS)]
    parts += ["\n## Settings with the former rule of shrinkage", *tables(FORMER)]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = study.arguments(__doc__, "runs/capped")
    parser.add_argument("--search", action="store_true", help="the settings on held-out images, by the plan")
    parser.add_argument("--layers", action="store_true", help="the same for the features of all layers")
    chosen = parser.parse_args()
    if chosen.search:
        study.measure(HERE / "capped_search.yaml", SEARCH, chosen)
    elif chosen.layers:
        study.measure(HERE / "capped_layers.yaml", LAYERS, chosen)
    else:
        study.measure("capped.yaml", STUDY, chosen)
    (HERE / "CAPPED.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
