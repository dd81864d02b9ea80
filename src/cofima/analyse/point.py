"""A network at any place between those of a run, measured on the tasks seen."""

from typing import Literal

from cofima.analyse.measure import Measure, fewer, measure
from cofima.analyse.relearn import Relearned
from cofima.errors import CofimaError
from cofima.models.backbone import build_empty
from cofima.models.net import Net
from cofima.parts.batchnorm import refresh_batchnorm, statistics_moved
from cofima.training.sgd import plain_batches
from cofima.weights.pieces import Weights, snapshot

HeadChoice = Literal["raw", "aligned"]


class Points:
    """Measure networks with the head that training left, or with one that is aligned to each of them.

    The raw head is the same wherever it is used, so that only the backbone makes a difference. Aligned,
    each network gets what the method would give to it: Gaussians of the new classes, then an alignment.
    """

    def __init__(self, task: Relearned, head: HeadChoice = "raw", images: int | None = None) -> None:
        self.task, self.aligned = task, head == "aligned"
        method = task.before.method
        if self.aligned and not method.aligns_head:
            raise CofimaError(f"--head aligned: {method.label} does not align its head; use --head raw")
        self.context, facts = method.context, task.run.facts
        self.seen = fewer(task.seen, images)
        empty = build_empty(facts.name, facts.size, facts.final_norm)
        sizes = [len(each.classes) for each in task.seen]
        self.net = Net(empty, facts.features, sizes).to(self.context.device).eval()
        self.stale = statistics_moved(task.old, task.trained)

    def measure(self, weights: Weights, *, statistics: bool = False) -> Measure:
        """Measure these weights; batch normalisation is estimated anew unless they have ``statistics``."""
        self.net.load_state_dict(weights)
        if self.stale and not statistics:
            refresh_batchnorm(self.net, plain_batches(self.task.task.train, self.context, "batch norm"))
        if not self.aligned:
            return measure(self.net, self.seen, self.context)
        model = self.task.align_at(snapshot(self.net))
        model.method.net.eval()
        return measure(model.method.predict, self.seen, self.context)
