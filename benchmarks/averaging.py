"""Cost of averaging 86 M parameters (a ViT-B/16), as a ratio to the memory bandwidth it needs at least."""

import resource

import torch

from cofima import average, fisher_average
from ratios import cells, interleaved

PARAMETERS = 86_000_000
TENSORS = 150
MODEL_MB = PARAMETERS * 4 / 2**20


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def weights() -> dict[str, torch.Tensor]:
    return {f"block.{k}.weight": torch.rand(PARAMETERS // TENSORS) for k in range(TENSORS)}


def as_released(old, new, f_old, f_new, lam):
    """Do what the released code does: products of whole models, then a division."""
    return {
        k: (lam * f_new[k] * new[k] + (1 - lam) * f_old[k] * old[k]) / (lam * f_new[k] + (1 - lam) * f_old[k])
        for k in new
    }


def main() -> str:
    """Measure; return a section of Markdown."""
    torch.set_num_threads(1)
    old, new, f_old, f_new = (weights() for _ in range(4))
    a, b, c = (torch.rand(PARAMETERS) for _ in range(3))
    out = {key: torch.zeros_like(value) for key, value in new.items()}
    before = peak_mb()
    fisher_average(old, new, f_old, f_new, 0.4, out=out)
    extra = peak_mb() - before
    # STREAM triad moves 3 arrays; a Fisher average must read 4 and write 1, a plain one reads 2 and writes 1
    found = interleaved(
        lambda: torch.add(a, b, alpha=3.0, out=c),
        {
            "fisher_average, into existing memory|5": lambda: fisher_average(
                old, new, f_old, f_new, 0.4, out=out
            ),
            "fisher_average, into fresh memory|5": lambda: fisher_average(old, new, f_old, f_new, 0.4),
            "as the released code does it|5": lambda: as_released(old, new, f_old, f_new, 0.4),
            "average, into existing memory|3": lambda: average(old, new, 0.4, out=out),
        },
        rounds=5,
    )
    lines = [
        "## Averaging 86 M parameters",
        "",
        "CPU time divided by that of a STREAM triad (`c = a + s b`) that moves as many arrays as the average",
        "must read and write: one thread, float32. Fresh memory always costs page faults. Peak",
        f"memory grew by {extra:.0f} MB while averaging into existing memory (a model is {MODEL_MB:.0f} MB).",
        "",
        "| way | median | smallest | target |",
        "|---|---|---|---|",
    ]
    for name, ratios in found.items():
        way, arrays = name.split("|")
        target = "<= 2.2x" if "existing" in way else ""
        lines.append(f"| {way} | {cells([r * 3 / int(arrays) for r in ratios])} | {target} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(main())
