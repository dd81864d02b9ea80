"""How many images pass through a network in a run, forward and back: the first guess of its time.

Only the network counts; alignment, ridge regressions and the reading of files are small beside it.
"""

from cofima.methods import Method

FISHER = 1.3  # one image's part in an exact Fisher pass, in training steps


def passes(
    name: str, method: Method, epochs: int, images: tuple[int, int], tasks: int
) -> tuple[float, float]:
    """Return images in training steps, and images that pass forward only, over a whole run."""
    train, test = images
    tasks = 1 if name == "joint" else tasks
    later = train * (tasks - 1) / tasks  # images of all tasks but the first
    memory = float(getattr(method, "memory_size", 0))
    steps, forward = float(epochs * train), test * (tasks + 1) / 2
    if method.fixed_features:  # each image once, ever
        forward = float(train + test)
        steps = train / tasks * method.adapt.epochs if hasattr(method, "adapt") else 0.0
    elif name in ("l2p", "dual_prompt"):
        forward += train + test  # the queries
    elif name == "gdumb":
        steps = epochs * sum(min(memory, train * (t + 1) / tasks) for t in range(tasks))
    elif name == "der_pp":
        steps *= 3  # the batch, and two draws from the memory
    elif name == "bic":
        steps += epochs * min(memory, train) * (tasks - 1) / 2
        forward += epochs * later + train
    elif name == "lwf":
        forward += epochs * later  # the teacher
    if hasattr(method, "align"):
        forward += train  # the Gaussians
    if name == "ewc":
        steps += FISHER * train
    elif name == "cofima":
        steps += FISHER * (train + later)
    elif getattr(method, "lam", None) == "auto":
        steps += FISHER * train
    return steps, forward
