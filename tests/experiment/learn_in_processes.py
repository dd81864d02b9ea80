"""Learn tiny runs in double precision, alone or as one of the processes that torchrun started.

``python learn_in_processes.py FOLDER CASE...`` writes the results and predictions of each case to FOLDER.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import tiny
from cofima.core import distributed
from cofima.core.errors import CofimaError
from cofima.data.stream import Stream
from cofima.data.transforms import View
from cofima.store.model import Model
from cofima.training.loop import plain_batches

CASES: dict[str, dict[str, Any]] = {
    "cofima sampled": {"options": {"fisher": {"labels": "sampled"}}},
    "cofima authors": {"options": {"variant": "authors"}},
    "coma auto": {"options": {"lam": "auto"}},
    "ranpac none": {"options": {"petl": "none"}},
    "l2p vote": {"options": {"vote": True, "top_k": 3}},
    "coma resnet": {"network": "resnet_test", "train": {"batchnorm": "frozen"}},
    "coma lda": {"options": {"classifier": "lda", "drift": "linear"}},
    "slca ridge": {"options": {"classifier": "ridge", "closed_form": {"projection": 32}}},
    "ema drift": {"options": {"drift": "linear"}},
    "slca balanced": {"train": {"balance": 1.0}},
    "coma lora": {"train": {"lora": {"rank": 2, "layers": "attention"}}},
    "ema lora resnet": {"network": "resnet_test", "train": {"lora": {"rank": 2}}},
}
SIZES, EACH = (3, 1, 2), 6  # also a single class; 18, 6 and 12 images
BATCH = 5  # two processes cannot share it equally, and the last batch has fewer images than four


def in_double_precision() -> None:
    """Compute all in float64, also where single precision is asked for."""
    torch.set_default_dtype(torch.float64)
    single = View._normalized
    View._normalized = lambda self, images: single(self, images).double()  # type: ignore[method-assign]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign,assignment]


def learn(case: str) -> tuple[Model, Stream, list[dict[str, Any]]]:
    """Learn all tasks of a case, and score each; images are cropped and mirrored."""
    name, more = case.partition(" ")[0], CASES.get(case, {})
    options = dict(more.get("options", {}))
    if name == "ranpac":
        options.setdefault("adapt", {"epochs": 2, "batch_size": BATCH, "dropout": 0.0})
    train = {"epochs": 2, "batch_size": BATCH} | more.get("train", {})
    config = tiny.tiny_config(name, more.get("network", "vit_test"), options=options, train=train)
    stream = replace(tiny.tiny_stream(SIZES, per_class=EACH), crop=0.5, flip=True)
    model = tiny.tiny_model(config, stream)
    passed: list[int] = []
    scores: list[dict[str, Any]] = []
    model.method.net.backbone.register_forward_pre_hook(lambda _, args: passed.append(len(args[0])))
    stream = model.method.stream(stream)
    for task in stream:
        model.method.learn(task)
        model.tasks.append(task.names)
        score = model.method.score(stream[: task.index + 1])
        scores.append({"accuracy": score.accuracy, "top5": score.top5, "passed": sum(passed)})
    return model, stream, scores


@torch.inference_mode()
def found(model: Model, stream: Stream) -> dict[str, Tensor]:
    """Return the weights, what is remembered, and the logits of all test images."""
    state = {f"state.{key}": value for key, value in model.method.state().items()}
    weights = {f"model.{key}": value for key, value in model.weights().items()}
    batches = [images for task in stream for images, _ in plain_batches(task.test, model.method.context, "")]
    logits = torch.cat([model.method.predict(images) for images in batches])
    return {key: v.contiguous().clone() for key, v in (state | weights | {"logits": logits}).items()}


def main(folder: Path, cases: list[str]) -> None:
    """Learn the cases one after the other."""
    in_double_precision()
    torch.use_deterministic_algorithms(True)
    with distributed.process_group(torch.device("cpu")):
        for case in cases:
            model, stream, scores = learn(case)
            save_file(found(model, stream), folder / f"{case}.{distributed.rank()}.safetensors")
            (folder / f"{case}.{distributed.rank()}.json").write_text(json.dumps(scores))
        distributed.require_same("the same", 1)
        try:
            distributed.require_same("the number", distributed.rank())
        except CofimaError as error:
            (folder / f"refused.{distributed.rank()}.txt").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
