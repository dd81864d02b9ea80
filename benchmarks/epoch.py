"""Cost of one training epoch, against the bare PyTorch loop on the same images."""

import torch
from torch.nn.functional import cross_entropy

from cofima.core.seeds import Seeds
from cofima.data.sources.in_memory import blobs
from cofima.data.stream import split
from cofima.experiment.stream import stream_view
from cofima.methods.seq_ft import SeqFT
from cofima.models import backbone
from cofima.models.net import Net
from cofima.models.options import ModelOptions
from cofima.store.config import Config
from cofima.training.context import Context
from cofima.training.loop import sgd
from cofima.training.options import TrainOptions
from ratios import cells, interleaved


def main() -> str:
    """Measure; return a section of Markdown."""
    torch.set_num_threads(1)
    config = Config()
    module, facts = backbone.create("vit_micro", ModelOptions())
    stream = split(blobs(classes=4, per_class=64, side=facts.stored), 4, 4, None)
    task, images = stream[0], stream[0].train
    view = stream_view(config, facts, stream)
    train = TrainOptions(epochs=1, batch_size=32, lr=1e-4)
    context = Context(view, train, Seeds(0), torch.device("cpu"))
    method = SeqFT()
    method.setup(Net(module, facts.features), context)
    method.task = task
    method.begin(task)
    net = method.net

    def bare() -> None:
        generator = torch.Generator().manual_seed(0)
        slow = {"params": net.backbone.parameters(), "lr": train.lr * train.backbone_lr_scale}
        optimizer = torch.optim.SGD(
            [slow, {"params": net.head.parameters()}], lr=train.lr, momentum=0.9, weight_decay=5e-4
        )
        net.train()
        for index in torch.randperm(len(images), generator=generator).split(train.batch_size):
            pixels, labels = images.batch(index)
            loss = cross_entropy(net(view.train(pixels, generator)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    ours = interleaved(bare, {"ours": lambda: sgd(net, images, method.loss, context, 0)}, rounds=9)["ours"]
    return "\n".join(
        [
            "## One training epoch",
            "",
            f"`vit_micro`, {len(images)} images, batches of {train.batch_size}, one thread: CPU time of one",
            "epoch of `cofima` divided by that of a bare PyTorch loop with the same images and augmentation,",
            "pair by pair.",
            "",
            "| | median | smallest | target |",
            "|---|---|---|---|",
            f"| one epoch | {cells(ours)} | <= 1.05x |",
            "",
        ]
    )


if __name__ == "__main__":
    print(main())
