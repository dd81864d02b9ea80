"""Named, independent random number streams derived from one seed."""

from dataclasses import dataclass
from hashlib import sha256

import torch


def seed_global(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's global generators, which dropout uses; without a device, only that of the CPU.

    ``torch.manual_seed`` is avoided on the CPU: as long as CUDA is not initialized, it appends each seed,
    with a stack trace, to a list that grows for the lifetime of the process.
    """
    if device is None or device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@dataclass(frozen=True)
class Seeds:
    """Factory of generators, one per consumer, so that a new consumer does not shift the others.

    A stream depends only on the seed, its name and its place (task, epoch, ...), never on earlier draws: a
    run that resumes after a crash draws the same numbers.
    """

    seed: int

    def number(self, name: str, *place: int) -> int:
        """Return the 63-bit seed of the stream ``name`` at ``place``."""
        text = "/".join(map(str, (self.seed, name, *place)))
        return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1

    def generator(self, name: str, *place: int) -> torch.Generator:
        """Return a new CPU generator at the start of the stream ``name`` at ``place``."""
        return torch.Generator().manual_seed(self.number(name, *place))
