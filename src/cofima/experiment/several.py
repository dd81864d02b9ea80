"""Check, before any work, that several processes can share a run."""

from torch import nn

from cofima import methods
from cofima.core import distributed, torchrun
from cofima.core.errors import problems
from cofima.store.config import Config
from cofima.training.loop import norms


def refuse_several(config: Config, backbone: nn.Module | None = None) -> None:
    """Refuse a run that would not compute in several processes what it computes in one."""
    count = max(torchrun.world_size(), distributed.world_size())
    if count == 1:
        return
    kind, how, wrong = methods.find(config.method), config.train, []
    if kind.single_process_only:
        wrong.append(f"method = {config.method}: {kind.single_process_only}")
    if how.batch_size < count:
        wrong.append(f"train.batch_size = {how.batch_size}: smaller than the number of processes")
    if config.device not in ("auto", "cpu", "cuda"):
        wrong.append(f"device = {config.device}: one for all; give auto or cuda (a GPU each), or cpu")
    trained = not (kind.frozen_backbone or kind.fixed_features)
    if backbone is not None and trained and how.batchnorm == "train" and norms(backbone):
        wrong.append(
            f"train.batchnorm = train: each process would normalize {config.backbone} by the statistics of "
            "its part of a batch; give train.batchnorm=frozen, or run in one process"
        )
    if wrong:
        raise problems(f"a run in {count} processes", wrong)
