"""Run every benchmark and write benchmarks/RESULTS.md: `make bench`, or `python benchmarks/run.py`."""

import os
import platform
import sys
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))

import timm
import torch

import alignment
import averaging
import cofima
import epoch
import features
import fisher
import grid
import inflight
import merge
import photographs
import pipeline


def processor() -> str:
    """Return the processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        return names[0] if names else platform.processor()
    return platform.processor()


def main() -> None:
    head = [
        "# Speed, as ratios",
        "",
        "Written by `make bench`. Every number is a ratio of CPU times measured alternately in one process;",
        "seconds of different machines, or of different moments on a busy one, do not compare.",
        "",
        f"{date.today()}, {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}, timm {timm.__version__}, cofima {cofima.__version__}.",
        "",
        "",
    ]
    sections = []
    for part in (fisher, averaging, alignment, epoch, inflight, features, photographs, pipeline, grid, merge):
        print(f"{part.__name__} ...", flush=True)
        sections.append(part.main())
        print(sections[-1], flush=True)
    Path(__file__).with_name("RESULTS.md").write_text("\n".join(head) + "\n".join(sections))


if __name__ == "__main__":
    main()
