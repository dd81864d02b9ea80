"""Merge checkpoints, files or model folders, tensor by tensor; and measure which weights matter to them."""

from cofima.merging.fisher import Measured, fisher
from cofima.merging.merge import Merged, merge

__all__ = ["Measured", "Merged", "fisher", "merge"]
