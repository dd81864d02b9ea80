"""What every method is: options as fields, and a few small hooks around the training of a task."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from cofima.core import distributed
from cofima.core.errors import CofimaError
from cofima.data.image_set import Images
from cofima.data.stream import Stream, Task
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.state import Entry, tagged, untagged
from cofima.models.head import Head
from cofima.models.net import Net
from cofima.models.vit import incompatibility
from cofima.training.context import NO_HOOKS, Batch, Context, Hooks
from cofima.training.evaluate import Score, evaluate
from cofima.training.features import CachedFeatures
from cofima.training.loop import frozen, plain_batches, sgd

if TYPE_CHECKING:
    from cofima.methods.components.gaussians import ClassGaussians

Share = Annotated[float, Field(ge=0, le=1)]
Step = Callable[[Task], None]


@dataclass(eq=False)
class Method:
    """Learn tasks one after another; the fields of a subclass are its options.

    A task is learnt by :meth:`begin` (the head grows), training on :meth:`loss`, and :meth:`end`
    (merge, remember, align). What must survive until the next task goes through :meth:`state`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    label: ClassVar[str] = "?"
    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    frozen_old_heads: ClassVar[bool] = True
    frozen_backbone: ClassVar[bool] = False
    fixed_features: ClassVar[bool] = False
    """Whether the backbone never moves again once features were asked for, so that each is computed once."""
    needs_vit: ClassVar[bool] = False
    keeps_images: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = False
    """All tasks are learned as one, so that there is no accuracy over time."""
    can_extend: ClassVar[bool] = True
    """Whether what was learnt can go on learning without the old images."""
    can_refine: ClassVar[bool] = False
    """Whether more images of known classes can be learnt."""
    can_refine_one_class: ClassVar[bool] = False
    """Whether more images of one known class alone teach something."""
    state_schema: ClassVar[tuple[Entry, ...]] = ()
    """What :meth:`state` returns, entry by entry. What is not declared cannot be merged or lose a class."""
    steps_change_state: ClassVar[bool] = False
    """Whether the steps of a task change :meth:`state` already, and not only its end."""
    is_fallback: ClassVar[bool] = False
    """Whether any model that has the entries declared can go on as this method; not inherited."""
    unmergeable_rows: ClassVar[str] = ""
    """Why the rows that two models have of one class cannot be averaged, if so."""
    aligns_head: ClassVar[bool] = False
    """True if :meth:`fit_head` does anything."""
    grows_with_tasks: ClassVar[bool] = False
    """Whether the method must keep something small for each task, beside what it keeps for each class."""
    single_process_only: ClassVar[str] = ""
    """Why the method cannot be learnt by several processes, each on its part of every batch, if so.

    It can, where :meth:`loss` is a mean over images, plus terms that are the same whatever the images.
    """
    options_for_any_backbone: ClassVar[dict[str, Any]] = {}
    """Options with which the method works on every backbone, where its defaults need a transformer."""

    def setup(self, net: Net, context: Context) -> None:
        """Take over the network and what to learn with; called once, before weights are loaded from disk."""
        self.check(net.backbone)
        if self.frozen_backbone:
            net.backbone.requires_grad_(False)
        self.net = net
        self.context = context
        self.cached_features = CachedFeatures(net, context)
        self.facts: dict[str, Any] = {}
        self.running: dict[str, Callable[[], float]] = {}
        self.task: Task

    def check(self, backbone: nn.Module) -> None:
        """Refuse a backbone that the method cannot work with, before any work."""
        if self.needs_vit and (problem := incompatibility(backbone)):
            raise CofimaError(f"{self.label} needs a vision transformer with a class token; {problem}")

    def stream(self, stream: Stream) -> Stream:
        """Return the tasks as this method takes them."""
        return stream

    def first_task_key(self) -> tuple[Any, ...] | None:
        """Return all that the state after the first task depends on, beside what every method shares.

        Methods that return the same end a first task with the same bits, so that a grid learns it once;
        None shares nothing. Only the class that defines it itself is believed: see
        :func:`cofima.methods.first_task_key`.
        """
        return None

    def cost(self, plan: Plan) -> Cost:
        """Return what a run costs in passes through the network; here that of plain training."""
        if self.fixed_features:  # each image once, ever
            return Cost(0, plan.train + plan.test)
        return Cost(plan.epochs * plan.train, plan.test * (plan.tasks + 1) / 2)

    def learn(
        self,
        task: Task,
        *,
        context: Context | None = None,
        hooks: Hooks = NO_HOOKS,
        train: Step | None = None,
        end: Step | None = None,
    ) -> None:
        """Learn a task, from the state after the task before.

        Args:
            task: The task.
            context: What to learn with from now on, if not what :meth:`setup` was given.
            hooks: Callbacks of the training.
            train: Stands in for :meth:`train`: analyses look on, or put in what training led to.
            end: Stands in for :meth:`end`.
        """
        self.context = context or self.context
        self.task, self.facts = task, {"seconds": {}, "notes": [], "lam": None}
        gpus = [self.context.device] if self.context.device.type == "cuda" else []  # not those of others
        with torch.random.fork_rng(gpus), self.timed("total"), self.timed("cpu", time.process_time):
            torch.manual_seed(self.context.seeds.number("torch", task.index) + distributed.rank())
            self.begin(task)
            if train is None:
                self.train(task, hooks)
            else:
                train(task)
            self.cached_features.invalidate()
            (end or self.end)(task)
            distributed.broadcast_weights(self.net, self.head())

    def begin(self, task: Task) -> None:
        """Prepare for the task: new rows in the head, old ones frozen."""
        if task.known:
            self.net.head.requires_grad_(False)
            return
        generator = self.context.seeds.generator("head", task.index)
        self.net.grow(len(task.classes), generator, freeze=self.frozen_old_heads)

    def train(self, task: Task, hooks: Hooks = NO_HOOKS) -> None:
        """Run the batch loop on the task's images."""
        if task.known:
            self.refine(task, hooks)
            return
        if len(task.classes) == 1 and task.index == 0:
            self.note(
                "the first task has one class: there is nothing to tell apart yet, so nothing is trained"
            )
            self.net.eval()  # as after training: test images must not move batch statistics
            return
        still = len(task.classes) == 1 and self.context.train.freeze_backbone_on_single_class
        with self.timed("train"), frozen(self.net.backbone, still):
            sgd(
                self.net,
                self.data(task),
                self.loss,
                self.context,
                task.index,
                after_step=self.after_step,
                optimizer=self.optimizer(),
                hooks=hooks,
            )

    def refine(self, task: Task, hooks: Hooks = NO_HOOKS) -> None:
        """Train the backbone and the rows of known classes on more of their images, against each other."""
        if len(task.known) == 1:
            self.note("more images of one known class: there is nothing to tell apart, so nothing is trained")
            self.net.eval()
            return
        whole, rows = self.net.head, torch.tensor(task.known)
        self.net.head = Head(whole.features, [len(rows)]).to(self.context.device)
        self.net.head.load_flat(**{key: value[rows] for key, value in whole.flat().items()})
        among = replace(task.train, labels=torch.searchsorted(rows, task.train.labels))
        with self.timed("train"):
            # Nothing can be asked whether to stop: this head has the rows of some classes only.
            hooks = replace(hooks, stop=None)
            sgd(self.net, among, self._refine_loss, self.context, task.index, hooks=hooks)
        flat = whole.flat()
        for key, value in self.net.head.flat().items():
            flat[key][rows] = value
        whole.load_flat(**flat)
        self.net.head = whole

    def _refine_loss(self, batch: Batch) -> Tensor:
        return cross_entropy(self.net(batch.images), batch.labels)

    def data(self, task: Task) -> Images:
        """Return the images to train on."""
        return task.train

    def optimizer(self) -> Optimizer | None:
        """Return what takes the steps of a task, where it is not SGD at the rates of ``train``."""
        return None

    def loss(self, batch: Batch) -> Tensor:
        """Return what a step makes smaller: the local cross-entropy, unless a method says otherwise."""
        return self.local_loss(self.net(batch.images), batch.labels)

    def local_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy over the current task's logits alone.

        With a single new class that would be 0 whatever the weights, so all classes seen compete.
        """
        first = self.task.classes.start if len(self.task.classes) > 1 else 0
        return cross_entropy(logits[:, first:], labels - first)

    def after_step(self, batch: Batch) -> None:
        """Look at the weights after each step, and at the batch that it was taken on."""

    def end(self, task: Task) -> None:
        """Finish the task: merge weights, remember, align."""

    def fit_head(self, task: Task) -> None:
        """Fit what is remembered of the task's classes, then the head, to the weights as they are."""

    def head(self) -> Head:
        """Return the head that predicts."""
        return self.net.head

    def class_statistics(self) -> "ClassGaussians | None":
        """Return the Gaussians by which every class is remembered, or None."""
        return None

    def predict(self, images: Tensor) -> Tensor:
        """Return the logits of every class seen, for images as they are seen at test time."""
        logits: Tensor = self.head()(self.net.features(images))
        return logits

    def score(self, seen: Sequence[Task]) -> Score:
        """Score what is predicted for the test images of the tasks seen."""
        if self.fixed_features:
            return evaluate(self.head(), seen, self.context, self.cached_features.batches)
        return evaluate(self.predict, seen, self.context)

    @torch.inference_mode()
    def features(self, images: Images) -> Tensor:
        """Return the features of images, in order, on the CPU."""
        if self.fixed_features:
            return self.cached_features(images)
        self.net.eval()
        part = distributed.current_shard(len(images))
        pairs = plain_batches(images, self.context, "features", part)
        return part.gather(torch.cat([self.net.features(x).float().cpu() for x, _ in pairs]))

    def note(self, text: str) -> None:
        """Say something about this task to the user, and keep it in the history."""
        self.facts["notes"].append(text)
        self.context.progress.say(text)

    def state(self) -> dict[str, Tensor]:
        """Return what the next task needs beside the backbone and the head that predicts."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` returned, when backbone and predicting head are in place."""

    def task_state(self) -> dict[str, Tensor]:
        """Return what the steps of a task change beside the network, if a run is cut off between two.

        What :meth:`begin` makes of the state before the task and of the seed is made again; here is only
        what has changed since. Random streams that the method holds are found without being named.
        """
        streams = {name: chance.get_state() for name, chance in self._streams().items()}
        return tagged("stream", streams) | (self.state() if self.steps_change_state else {})

    def restore_task_state(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`task_state` returned, after :meth:`begin`."""
        kept = untagged("stream", state)  # of tasks before, too, which this process has not learned
        for name, chance in self._streams().items():
            if name in kept:
                chance.set_state(kept[name])
        if self.steps_change_state:
            self.restore({key: value for key, value in state.items() if not key.startswith("stream.")})

    def _streams(self) -> dict[str, torch.Generator]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Generator)}

    @contextmanager
    def timed(self, phase: str, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
        """Add the seconds spent within to the task's history."""
        start = clock()
        self.running[phase] = lambda: clock() - start
        try:
            yield
        finally:
            self.add_seconds({phase: self.running.pop(phase)()})

    def seconds_so_far(self) -> dict[str, float]:
        """Return the seconds of each phase so far, also of those that are not over."""
        seconds: dict[str, float] = self.facts["seconds"]
        return seconds | {phase: seconds.get(phase, 0.0) + now() for phase, now in self.running.items()}

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Count seconds of phases, in the task's history."""
        mine = self.facts["seconds"]
        mine |= {phase: mine.get(phase, 0.0) + value for phase, value in seconds.items()}
