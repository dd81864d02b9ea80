"""metrics.jsonl shown by others: TensorBoard, Weights & Biases, MLflow; on disk, unless a server is named."""

from cofima.experiment.trackers.kinds import KINDS, Tracker, choose, replay, tracked

__all__ = ["KINDS", "Tracker", "choose", "replay", "tracked"]
