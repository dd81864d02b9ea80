"""Run every benchmark and write benchmarks/RESULTS.md: `make bench`, or `python benchmarks/run.py`.

`python benchmarks/run.py fisher bare` runs these two, and replaces their sections alone.
"""

import os
import platform
import re
import sys
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))

import timm
import torch

import alignment
import averaging
import bare
import cofima
import epoch
import features
import first_answer
import fisher
import fisher_price
import grid
import inflight
import memory
import merge
import photographs
import pipeline
import scaling

SECTIONS = (
    first_answer,
    fisher,
    fisher_price,
    averaging,
    alignment,
    epoch,
    bare,
    inflight,
    features,
    photographs,
    pipeline,
    grid,
    merge,
    scaling,
    memory,
)


def processor() -> str:
    """Return the processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        return names[0] if names else platform.processor()
    return platform.processor()


def head() -> str:
    """Return the lines above all sections."""
    lines = [
        "# Speed, as ratios",
        "",
        "Written by `make bench`. Every number is a ratio of CPU times measured alternately in one process,",
        "unless its section says otherwise; seconds from different machines, or from different moments on a",
        "busy one, are not comparable.",
        "",
        f"{date.today()}, {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}, timm {timm.__version__}, cofima {cofima.__version__}.",
    ]
    return "\n".join(lines) + "\n\n"


def with_section(text: str, section: str) -> str:
    """Return the results with a section in place of the former one of the same title, or at the end."""
    title, _, rest = section.partition("\n")
    dated = f"{title}\n\nMeasured on {date.today()}, {processor()}.\n{rest.rstrip()}\n"
    parts = re.split(r"(?m)^(?=## )", text.rstrip() + "\n\n")
    kept = [f"{dated}\n" if part.startswith(f"{title}\n") else part for part in parts]
    return "".join(kept if f"{dated}\n" in kept else [*kept, dated]).rstrip() + "\n"


def main() -> None:
    """Run all benchmarks, or those named on the command line, whose sections then replace the former ones."""
    named = {part.__name__: part for part in SECTIONS}
    wanted = sys.argv[1:]
    if unknown := set(wanted) - set(named):
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(named)}")
    results = Path(__file__).with_name("RESULTS.md")
    sections = []
    for name in wanted or named:
        print(f"{name} ...", flush=True)
        sections.append(named[name].main())
        print(sections[-1], flush=True)
        if wanted:
            results.write_text(with_section(results.read_text("utf-8"), sections[-1]), "utf-8")
    if not wanted:
        results.write_text(head() + "\n".join(sections), "utf-8")


if __name__ == "__main__":
    main()
