"""Named, independent random streams derived from one seed."""

from dataclasses import dataclass
from hashlib import sha256

import torch


def seed_global(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's own generators, from which dropout draws; without a device, that of the CPU alone.

    Where CUDA was not used yet, ``torch.manual_seed`` puts each seed, with a stack trace, on a list that
    grows for as long as the process lives.
    """
    if device is None or device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@dataclass(frozen=True)
class Seeds:
    """Derive a generator for each consumer, so that a new consumer does not shift the others.

    A stream depends on the seed, its name and its place (task, epoch, ...) alone, never on what
    was drawn before: a run that resumes after a crash draws the same numbers.
    """

    seed: int

    def number(self, name: str, *place: int) -> int:
        """Return the 63-bit seed of the stream ``name`` at ``place``."""
        text = "/".join(map(str, (self.seed, name, *place)))
        return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1

    def generator(self, name: str, *place: int) -> torch.Generator:
        """Return a fresh CPU generator at the start of the stream ``name`` at ``place``."""
        return torch.Generator().manual_seed(self.number(name, *place))
