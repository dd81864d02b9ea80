"""Count what a training step keeps in memory for its backward pass: `python benchmarks/activations.py`.

Nothing is computed: the network is built without values (torch's device "meta"), and every tensor that
autograd saves is counted once by its storage, parameters aside. The numbers hold for any machine.
"""

import argparse

import timm
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


def count(name: str, batch: int) -> tuple[int, int, float]:
    """Return parameters, bytes saved for backward, and floating-point operations of an image forward."""
    with torch.device("meta"):
        net = timm.create_model(name, num_classes=0)
        images = torch.empty(batch, 3, 224, 224)
    own = {weight.untyped_storage()._cdata for weight in net.state_dict().values()}
    saved: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
            held.append(storage)  # alive, or its address would be given to the next one
        return value

    held: list[torch.UntypedStorage] = []
    flops = FlopCounterMode(display=False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value), flops:
        net(images)
    parameters = sum(weight.numel() for weight in net.parameters())
    return parameters, sum(saved.values()), flops.get_total_flops() / batch


def main() -> None:
    """Print the counts of a network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=128)
    given = parser.parse_args()
    parameters, saved, flops = count(given.name, given.batch)
    print(
        f"{given.name}, batch {given.batch}, float32: {parameters / 1e6:.1f} M parameters, "
        f"{saved / 1e9:.1f} GB of activations, {flops / 1e9:.2f} GFLOP an image forward"
    )


if __name__ == "__main__":
    main()
