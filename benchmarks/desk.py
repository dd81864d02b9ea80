"""Every method on photographs, at the scale of a desk: writes benchmarks/DESK.md.

The images are Caltech-101's, found as caltech101/train and caltech101/test below COFIMA_DATA. Run it again
to continue; what finished cells measured is kept in benchmarks/desk.jsonl, one line each:

    COFIMA_DATA=/where/it/is python benchmarks/desk.py [--jobs 2] [--only seed=1993] [--collect]
"""

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import study

HERE = Path(__file__).parent
STUDY = HERE / "desk.jsonl"
COMA = ("CoMA (lam=0.2)", "CoMA (train.backbone_lr_scale=0.01)")  # the best held-out settings


def tables() -> Iterable[str]:
    """Yield a table for each backbone, the upper bound first, then from the best method down."""
    over = study.Gap("over CoMA", lambda row: row.label in COMA)
    for members, lines in study.compared(STUDY, [over]):
        yield f"\n## {members[0].backbone}, {members[0].record.preprocess['size']} px\n"
        yield from lines


def page() -> str:
    """Return DESK.md: the tables below what it says of itself."""
    return (HERE / "desk.head.md").read_text("utf-8") + "\n".join(tables()) + "\n"


def main() -> None:
    study.measure("desk.yaml", STUDY, study.arguments(__doc__, "runs/desk").parse_args())
    (HERE / "DESK.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
