"""Training loop: SGD with a low learning rate for the backbone and a high one for the head."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from cofima.core import distributed
from cofima.core.errors import CofimaError
from cofima.core.progress import STEP
from cofima.data.image_set import Images, ImageSet
from cofima.models.net import Net
from cofima.training.context import NO_HOOKS, Batch, Context, Hooks, Loss
from cofima.training.depthwise import faster_gradients
from cofima.training.lora import NO_FACTORS, LowRank
from cofima.training.options import TrainOptions

CHECK_EVERY = 50  # steps between two checks of the loss, each of which stalls a GPU

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
    factors: LowRank = NO_FACTORS,
) -> None:
    """Train ``net`` on ``images`` for ``context.train.epochs`` epochs.

    Args:
        net: The network; left in eval mode.
        images: Training images.
        loss: Loss of a batch.
        context: Settings, seeds, device and progress.
        task: Index of the task; part of the seed of every random stream.
        after_step: Called after each optimizer step.
        optimizer: Replacement for SGD. Its learning rates stay constant, unless milestones are configured
            explicitly.
        hooks: Checkpoint and callbacks.
        factors: LoRA factors, which are trained in place of the backbone's weights.
    """
    how, seeds, checkpoint = context.train, context.seeds, hooks.checkpoint
    if optimizer is None:
        optimizer = make_optimizer(net, how, factors)
    elif how.milestones is None:  # the default decay belongs to SGD: keep the learning rates of another
        how = how.model_copy(update={"milestones": ()})
    schedule = make_schedule(optimizer, how)
    half = torch.autocast(context.device.type, torch.bfloat16, enabled=how.precision == "bf16")
    faster = faster_gradients(net)
    loss = distributed.synchronized(net, loss)
    net.train()
    # A frozen backbone runs in eval mode: dropout would only add noise to features that do not change.
    net.backbone.train(bool(trainable(net.backbone)))
    if how.batchnorm == "frozen" or factors.weights:  # LoRA: only the factors may change the backbone
        for layer in batchnorm_layers(net):
            layer.eval()
    for epoch in range(checkpoint.begin(net, optimizer, schedule), how.epochs):
        # Each epoch has its own random number generators: the order of images then does not depend on how
        # many numbers augmentation or dropout drew, and an epoch is resumed without replaying earlier ones.
        augment = seeds.generator("augment", task, epoch)
        loader = seeds.generator("loader", task, epoch)
        steps = batches(len(images), how.batch_size, loader, repeats(images, how.balance, loader))
        losses = torch.zeros(len(steps), device=context.device)
        done = checkpoint.begin_epoch(epoch, augment, losses)
        label = f"epoch {epoch + 1}/{how.epochs}"
        left = context.progress.track(steps[done:], len(steps) - done, label)
        for step, index in enumerate(left, done):
            batch = make_batch(images, index, context, augment)
            with half, faster:
                value = loss(batch) * batch.shard.weight  # shards may differ in size by one image
            optimizer.zero_grad()
            torch.autograd.backward(value)
            # LoRA: the network holds the product of the factors, so that losses and hooks see the effective
            # weights. Gradients go from the product to the factors before the step, values back after it.
            factors.take_gradients()
            optimizer.step()
            factors.write_weights()
            losses[step] = value.detach()  # stays on the device: reading it at each step would stall a GPU
            if after_step is not None:
                after_step(batch)
            if (step + 1) % CHECK_EVERY == 0 or step + 1 == len(steps):
                # clone: the reduction is in place, and checkpoints contain the losses of this process
                check_losses(
                    distributed.all_reduce_sum(losses[: step + 1].clone()) / distributed.world_size(),
                    task,
                    epoch,
                )
            context.progress.worked(STEP * len(index))
            checkpoint.offer(step + 1)  # last: only now are weights, optimizer and method at the same step
        if hooks.on_epoch is not None:
            mean = distributed.all_reduce_sum(losses.clone()) / distributed.world_size()
            hooks.on_epoch(task, epoch, mean, [float(group["lr"]) for group in optimizer.param_groups])
        schedule.step()
        if hooks.stop is not None and hooks.stop():
            break
    check_weights(net, task)
    net.zero_grad()  # frees the gradients, as large as the network: the Fisher information needs the memory
    net.eval()
    checkpoint.end()


def make_batch(images: Images, index: Tensor, context: Context, augment: torch.Generator) -> Batch:
    """Load and augment this process's shard of the images at ``index``."""
    shard = distributed.current_shard(len(index))
    pixels, labels = images.batch(index[shard.rows])
    seen = context.view.train(pixels.to(context.device, non_blocking=True), augment, shard)
    return Batch(seen, labels.to(context.device), pixels, shard)


def make_optimizer(net: Net, how: TrainOptions, factors: LowRank = NO_FACTORS) -> torch.optim.SGD:
    """Return SGD for the trainable parameters, with a scaled learning rate for the backbone (or its factors).

    This is the slow learner of SLCA: pre-trained features change slowly, the head learns new classes fast.
    """
    groups = [
        {"params": factors.parameters() or trainable(net.backbone), "lr": how.lr * how.backbone_lr_scale},
        {"params": trainable(net.head), "lr": how.lr},
    ]
    return torch.optim.SGD(groups, lr=how.lr, momentum=how.momentum, weight_decay=how.weight_decay)


def make_schedule(
    optimizer: torch.optim.Optimizer, how: TrainOptions
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the learning rate schedule, stepped once per epoch."""
    if how.schedule == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(how.epochs, 1))
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, how.decays, how.gamma)


def batches(count: int, size: int, generator: torch.Generator, repeats: Tensor | None = None) -> list[Tensor]:
    """Split shuffled indices into batches; ``repeats`` is the number of occurrences of each index."""
    if repeats is None:
        return _split(torch.randperm(count, generator=generator), size)
    index = torch.repeat_interleave(repeats)
    return _split(index[torch.randperm(len(index), generator=generator)], size)


def repeats(images: Images, balance: float, generator: torch.Generator) -> Tensor | None:
    """Return the number of times each image is seen in an epoch, or None if every image is seen once.

    Images of a class with n images, where the largest class has N, are repeated (N/n)^balance times; the
    fractional part is the probability of one more repetition.
    """
    if not balance or not isinstance(images, ImageSet):
        return None
    counts = torch.bincount(images.labels).double()
    times = (counts.max() / counts[images.labels]) ** balance
    chance = torch.rand(len(times), generator=generator, dtype=torch.float64)
    return (times + chance).floor().long()


def plain_batches(
    images: Images, context: Context, label: str, part: distributed.Shard | None = None, work: float = 1.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images and labels once, in order and without augmentation: all of them, or those of a shard.

    ``work`` is the cost of an image in forward passes; it affects the progress display only.
    """
    part = part or distributed.full_shard(len(images))
    index = ordered_batches(
        part.stop - part.start, distributed.largest_shard(context.train.batch_size), part.start
    )
    for at in context.progress.track(index, len(index), label):
        pixels, labels = images.batch(at)
        yield context.view.test(pixels.to(context.device)), labels.to(context.device)
        context.progress.worked(work * len(at))


def ordered_batches(count: int, size: int, start: int = 0) -> list[Tensor]:
    """Split ``count`` consecutive indices, beginning at ``start``, into batches."""
    return _split(torch.arange(start, start + count), size)


def check_losses(losses: Tensor, task: int, epoch: int) -> None:
    """Raise if a loss is not finite; the model folder still holds the state before this task."""
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        step = int(bad[0, 0])
        where = f"in task {task + 1}, epoch {epoch + 1}, step {step + 1}"
        raise CofimaError(f"the loss became {float(losses[step])} {where}; {ADVICE}")


def check_weights(net: nn.Module, task: int) -> None:
    """Raise if a weight is not finite: the last loss was computed before the last update."""
    sums = [value.sum() for value in net.state_dict().values() if value.is_floating_point()]
    if sums and not bool(torch.stack([torch.isfinite(s) for s in sums]).all()):
        raise CofimaError(f"weights became infinite in the last step of task {task + 1}; {ADVICE}")


def _split(order: Tensor, size: int) -> list[Tensor]:
    """Split into batches; a single last image joins the batch before it (BatchNorm cannot train on one)."""
    dealt = list(torch.split(order, size))
    if len(dealt) > 1 and len(dealt[-1]) == 1:
        dealt[-2:] = [torch.cat(dealt[-2:])]
    return dealt


@contextmanager
def frozen(module: nn.Module, freeze: bool) -> Iterator[None]:
    """Freeze a module's trainable parameters within the context if ``freeze`` is true."""
    held = trainable(module) if freeze else []
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


def batchnorm_layers(module: nn.Module) -> list[_BatchNorm]:
    """Return the batch normalization layers that track running statistics."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    return [layer for layer in layers if layer.running_mean is not None]


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
