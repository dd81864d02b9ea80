"""Every method on photographs, at the scale of a desk: writes benchmarks/DESK.md.

The images are Caltech-101's, found as caltech101/train and caltech101/test below COFIMA_DATA. Run it again
to continue; what finished cells measured is kept in benchmarks/desk.jsonl, one line each:

    COFIMA_DATA=/where/it/is python benchmarks/desk.py [--jobs 2] [--only seed=1993] [--collect]
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console

from cofima.cli.console import TerminalProgress
from cofima.experiment.config import check
from cofima.experiment.grid.cells import cells, name
from cofima.experiment.grid.scheduler import run_grid
from cofima.report.groups import Group, comparable, grouped
from cofima.report.metrics import forgetting, incremental, last
from cofima.report.runs import Run, collect, read_study
from cofima.store.model_folder import finished

HERE = Path(__file__).parent
STUDY = HERE / "desk.jsonl"
COMA = ("CoMA (lam=0.2)", "CoMA (train.backbone_lr_scale=0.01)")  # the best held-out settings
MEASURES: list[tuple[str, int, Callable[[Run], float | None]]] = [
    ("Last-Acc", 1, lambda run: last(run.matrix, run.sizes)),
    ("Inc-Acc", 1, lambda run: None if run.all_at_once else incremental(run.matrix, run.sizes)),
    ("Forgetting", 1, lambda run: None if run.all_at_once else forgetting(run.matrix)),
    ("CPU s", 0, lambda run: sum(step.seconds["cpu"] for step in run.history)),
    ("Peak MB", 0, lambda run: max(step.peak_memory_mb or 0 for step in run.history)),
    ("Kept MB", 2, lambda run: (run.history[-1].state_bytes or 0) / 1e6),
]


def measured() -> set[str]:
    """Return the cells that were measured, by their present names: newer settings at their defaults."""
    return {name(check(run.config)) for run in read_study(STUDY)} if STUDY.is_file() else set()


def tables() -> Iterable[str]:
    """Yield a table for each backbone, the upper bound first, then from the best method down."""
    for members in comparable(read_study(STUDY)):
        found = sorted(grouped(members), key=lambda row: (not row.all_at_once, -_mean(row, MEASURES[0][2])))
        yield f"\n## {members[0].backbone}, {members[0].record.preprocess['size']} px\n"
        yield "| Method | n | " + " | ".join(title for title, _, _ in MEASURES) + " | over CoMA |"
        yield "|---|---|" + "---|" * (len(MEASURES) + 1)
        for row in found:
            shown = [_shown(_values(row, of), f".{digits}f") for _, digits, of in MEASURES]
            gaps = _shown(list(_over(row, found)), "+.1f")
            yield f"| {row.label} | {len(row.runs)} | {' | '.join(shown)} | {gaps} |"


def _over(row: Group, others: Sequence[Group]) -> Iterable[float]:
    """Yield by how much a method's Last-Acc is above CoMA's best held-out setting, seed by seed."""
    base = next((other for other in others if other.label in COMA), row)
    known = {run.seed: last(run.matrix, run.sizes) for run in base.runs}
    if row is not base:
        yield from (last(r.matrix, r.sizes) - known[r.seed] for r in row.runs if r.seed in known)


def _values(row: Group, of: Callable[[Run], float | None]) -> list[float]:
    return [value for run in row.runs if (value := of(run)) is not None]


def _mean(row: Group, of: Callable[[Run], float | None]) -> float:
    return fmean(_values(row, of) or [0.0])


def _shown(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    spread = f" ± {stdev(values):{form.removeprefix('+')}}" if len(values) > 1 else ""
    return f"{fmean(values):{form}}{spread}"


def page() -> str:
    """Return DESK.md: the tables below what it says of itself."""
    return (HERE / "desk.head.md").read_text("utf-8") + "\n".join(tables()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/desk"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], metavar="KEY=VALUE[,VALUE]")
    parser.add_argument("--collect", action="store_true", help="run nothing; write what is finished")
    arguments = parser.parse_args()
    if not arguments.collect:
        chosen, done = cells("desk.yaml", [], arguments.only), measured()
        todo = [cell for cell in chosen if name(cell) not in done]
        print(f"{len(chosen)} cells, {len(chosen) - len(todo)} of them measured before")
        run_grid(todo, arguments.out, arguments.jobs, TerminalProgress(Console()))
    collect(sorted(folder for folder in arguments.out.glob("*") if finished(folder)), STUDY)
    (HERE / "DESK.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
