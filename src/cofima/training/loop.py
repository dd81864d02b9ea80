"""The batch loop: stochastic gradient descent with a slow backbone and a fast head."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from cofima.core import distributed
from cofima.core.errors import CofimaError
from cofima.data.image_set import Images, ImageSet
from cofima.models.net import Net
from cofima.training.context import NO_HOOKS, Batch, Context, Hooks, Loss
from cofima.training.options import TrainOptions

CHECK_EVERY = 50  # steps between two looks at the loss

ADVICE = (
    "the state after the task before is kept. Try a smaller train.lr or train.backbone_lr_scale "
    "(or options.lr, where the method has one), or look for broken images in this task."
)


def sgd(
    net: Net,
    images: Images,
    loss: Loss,
    context: Context,
    task: int,
    after_step: Callable[[Batch], None] | None = None,
    optimizer: Optimizer | None = None,
    hooks: Hooks = NO_HOOKS,
) -> None:
    """Train ``net`` on ``images`` for the epochs that ``context.train`` says.

    Another ``optimizer`` than SGD keeps its rates, but for milestones that were asked for.
    """
    how, seeds, checkpoint = context.train, context.seeds, hooks.checkpoint
    if optimizer is None:
        optimizer = make_optimizer(net, how)
    elif how.milestones is None:
        how = how.model_copy(update={"milestones": ()})
    schedule = make_schedule(optimizer, how)
    half = torch.autocast(context.device.type, torch.bfloat16, enabled=how.precision == "bf16")
    loss = distributed.synchronized(net, loss)
    net.train()
    # A frozen backbone computes as at test time: dropout would only add noise to features that stay.
    net.backbone.train(bool(moving(net.backbone)))
    if how.batchnorm == "frozen":
        for layer in norms(net):
            layer.eval()
    for epoch in range(checkpoint.begin(net, optimizer, schedule), how.epochs):
        # Streams of their own for each epoch: the order of images then does not depend on how much chance
        # augmentation or dropout have used, and an epoch can be resumed without running those before it.
        augment = seeds.generator("augment", task, epoch)
        loader = seeds.generator("loader", task, epoch)
        steps = batches(len(images), how.batch_size, loader, repeats(images, how.balance, loader))
        losses = torch.zeros(len(steps), device=context.device)
        done = checkpoint.begin_epoch(epoch, augment, losses)
        label = f"epoch {epoch + 1}/{how.epochs}"
        left = context.progress.track(steps[done:], len(steps) - done, label)
        for step, index in enumerate(left, done):
            batch = make_batch(images, index, context, augment)
            with half:
                value = loss(batch) * batch.shard.weight
            optimizer.zero_grad()
            torch.autograd.backward(value)
            optimizer.step()
            losses[step] = value.detach()  # read later: each look at it makes a GPU wait
            if after_step is not None:
                after_step(batch)
            if (step + 1) % CHECK_EVERY == 0 or step + 1 == len(steps):
                refuse_divergence(
                    distributed.all_reduce_sum(losses[: step + 1].clone()) / distributed.world_size(),
                    task,
                    epoch,
                )
            checkpoint.offer(step + 1)  # last: now weights, optimizer and method are of the same step
        if hooks.on_epoch is not None:
            mean = distributed.all_reduce_sum(losses.clone()) / distributed.world_size()
            hooks.on_epoch(task, epoch, mean, [float(group["lr"]) for group in optimizer.param_groups])
        schedule.step()
        if hooks.stop is not None and hooks.stop():
            break
    refuse_broken(net, task)
    net.zero_grad()  # as large as the network, and of no use to what comes next
    net.eval()
    checkpoint.end()


def make_batch(images: Images, index: Tensor, context: Context, augment: torch.Generator) -> Batch:
    """Read this process's share of the images at ``index``, and augment it."""
    shard = distributed.current_shard(len(index))
    pixels, labels = images.batch(index[shard.rows])
    seen = context.view.train(pixels.to(context.device, non_blocking=True), augment, shard)
    return Batch(seen, labels.to(context.device), pixels, shard)


def make_optimizer(net: Net, how: TrainOptions) -> torch.optim.SGD:
    """Return SGD over what may move: the backbone slowly, the head at the full rate."""
    groups = [
        {"params": moving(net.backbone), "lr": how.lr * how.backbone_lr_scale},
        {"params": moving(net.head), "lr": how.lr},
    ]
    return torch.optim.SGD(groups, lr=how.lr, momentum=how.momentum, weight_decay=how.weight_decay)


def make_schedule(
    optimizer: torch.optim.Optimizer, how: TrainOptions
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return how the learning rates fall, epoch by epoch."""
    if how.schedule == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(how.epochs, 1))
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, how.decays, how.gamma)


def batches(count: int, size: int, generator: torch.Generator, repeats: Tensor | None = None) -> list[Tensor]:
    """Deal shuffled indices into batches, each as often as ``repeats`` says."""
    if repeats is None:
        return _deal(torch.randperm(count, generator=generator), size)
    index = torch.repeat_interleave(repeats)
    return _deal(index[torch.randperm(len(index), generator=generator)], size)


def repeats(images: Images, balance: float, generator: torch.Generator) -> Tensor | None:
    """Return how often each image is seen in an epoch, or None where that is once.

    A class of n images, where the largest has N, is seen (N/n)^balance times as often; what is left
    after whole times is left to chance.
    """
    if not balance or not isinstance(images, ImageSet):
        return None
    counts = torch.bincount(images.labels).double()
    times = (counts.max() / counts[images.labels]) ** balance
    chance = torch.rand(len(times), generator=generator, dtype=torch.float64)
    return (times + chance).floor().long()


def plain_batches(
    images: Images, context: Context, label: str, part: distributed.Shard | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every image once, or of a part of them, in order, as it is seen at test time."""
    part = part or distributed.full_shard(len(images))
    index = in_order(part.stop - part.start, distributed.largest_shard(context.train.batch_size), part.start)
    for at in context.progress.track(index, len(index), label):
        pixels, labels = images.batch(at)
        yield context.view.test(pixels.to(context.device)), labels.to(context.device)


def in_order(count: int, size: int, start: int = 0) -> list[Tensor]:
    """Deal ``count`` indices from ``start`` on into batches."""
    return _deal(torch.arange(start, start + count), size)


def refuse_divergence(losses: Tensor, task: int, epoch: int) -> None:
    """Stop at the first loss that is not a number; nothing of this task has been written."""
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        step = int(bad[0, 0])
        where = f"in task {task + 1}, epoch {epoch + 1}, step {step + 1}"
        raise CofimaError(f"the loss became {float(losses[step])} {where}; {ADVICE}")


def refuse_broken(net: nn.Module, task: int) -> None:
    """Stop if a weight is not a number: the loss of the last step was taken before its update."""
    sums = [value.sum() for value in net.state_dict().values() if value.is_floating_point()]
    if sums and not bool(torch.stack([torch.isfinite(s) for s in sums]).all()):
        raise CofimaError(f"weights became infinite in the last step of task {task + 1}; {ADVICE}")


def _deal(order: Tensor, size: int) -> list[Tensor]:
    """Cut into batches; a lone last image joins the batch before (BatchNorm needs two to train)."""
    dealt = list(torch.split(order, size))
    if len(dealt) > 1 and len(dealt[-1]) == 1:
        dealt[-2:] = [torch.cat(dealt[-2:])]
    return dealt


@contextmanager
def frozen(module: nn.Module, still: bool) -> Iterator[None]:
    """Keep a module's weights from moving within, if ``still``."""
    held = moving(module) if still else []
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


def norms(module: nn.Module) -> list[_BatchNorm]:
    """Return the layers of batch normalization that keep statistics."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    return [layer for layer in layers if layer.running_mean is not None]


def moving(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
