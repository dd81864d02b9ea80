"""The loss of a batch whose parts are on several devices."""

import warnings
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cofima import ranks

Loss = Callable[[Tensor, Tensor], Tensor]


class _Loss(nn.Module):
    """A loss as a module: methods call more of a network than its forward, and all of it is synchronised."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss(images, labels)


def together(net: nn.Module, loss: Loss) -> Loss:
    """Return a loss whose gradients are averaged over the processes; for one process, the loss itself.

    It is wrapped anew for each training, as the head has grown. Which weights the loss covers is found out
    in the first step; the others stay as they are, as in one process.
    """
    if ranks.world() == 1 or not any(parameter.requires_grad for parameter in net.parameters()):
        return loss
    warnings.filterwarnings("ignore", "Grad strides do not match")  # of class tokens: 1 x 1 x width
    return DistributedDataParallel(_Loss(net, loss), static_graph=True, gradient_as_bucket_view=True)
