"""Base class of methods: options as fields, and small hooks around the training of a task."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from cofima.core import distributed
from cofima.core.errors import CofimaError
from cofima.core.seeds import seed_global
from cofima.data.image_set import Images
from cofima.data.stream import Stream, Task
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.components.discriminant import discriminant_rows
from cofima.methods.state import Entry, tagged, untagged
from cofima.models.head import Head
from cofima.models.net import Net
from cofima.models.vit import incompatibility
from cofima.training.context import NO_HOOKS, Batch, Context, Hooks
from cofima.training.evaluate import Score, evaluate
from cofima.training.features import CachedFeatures
from cofima.training.loop import frozen, plain_batches, sgd
from cofima.training.lora import LowRank, lora_problem, low_rank
from cofima.training.options import LoraOptions, TrainOptions

if TYPE_CHECKING:
    from cofima.methods.components.gaussians import Gaussians

Share = Annotated[float, Field(ge=0, le=1)]
Phase = Callable[[Task], None]


@dataclass(eq=False)
class Method:
    """Base class of all methods; the fields of a subclass are its options.

    A task is learned by :meth:`begin` (the head grows), :meth:`train` (the training loop on :meth:`loss`)
    and :meth:`end` (merge weights, store class statistics, align the head). State that must survive until
    the next task is saved by :meth:`state`, loaded by :meth:`restore`, and declared in ``state_schema``. Most
    methods override two or three of these hooks; the defaults are those of plain fine-tuning.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    # Shown in lists, tables and the documentation.
    label: ClassVar[str] = "?"
    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""

    # Training.
    frozen_old_heads: ClassVar[bool] = True
    """Head rows of old classes are frozen."""
    frozen_backbone: ClassVar[bool] = False
    """The backbone is never trained."""
    fixed_features: ClassVar[bool] = False
    """Features are only computed once the backbone is final, so that they can be cached."""
    default_lora: ClassVar[LoraOptions] = LoraOptions()
    """LoRA options for those that ``train.lora`` does not set; no LoRA by default."""
    all_at_once: ClassVar[bool] = False
    """All tasks are learned jointly as one: there is no accuracy over time."""
    sees_features_only: ClassVar[bool] = True
    """Predictions are a function of the network's features: the output of the head."""

    # Requirements.
    needs_vit: ClassVar[bool] = False
    """The backbone must be a vision transformer with a class token."""
    options_for_any_backbone: ClassVar[dict[str, Any]] = {}
    """Options with which the method works on any backbone, if its defaults need a transformer."""
    single_process_only: ClassVar[str] = ""
    """Why the method does not support several processes; empty if it does.

    It does if :meth:`loss` is a mean over images, plus terms that do not depend on the images.
    """

    # Capabilities of a trained model.
    can_extend: ClassVar[bool] = True
    """New classes can be learned later, without the old images."""
    can_refine: ClassVar[bool] = False
    """More images of known classes can be learned."""
    can_refine_one_class: ClassVar[bool] = False
    """More images of a single known class can be learned: more than the head's rows is updated."""
    aligns_head: ClassVar[bool] = False
    """:meth:`fit_head` is implemented."""

    # State between tasks.
    state_schema: ClassVar[tuple[Entry, ...]] = ()
    """Declarations of the entries of :meth:`state`; an undeclared entry blocks merging and class removal."""
    steps_change_state: ClassVar[bool] = False
    """Training steps change :meth:`state`, not only the end of a task; a checkpoint then includes it."""
    keeps_images: ClassVar[bool] = False
    """The state contains images of old classes."""
    grows_with_tasks: ClassVar[bool] = False
    """The state grows with the number of tasks, not only with the number of classes."""
    is_fallback: ClassVar[bool] = False
    """A model that lost entries of its state can continue as this method if the declared ones are left.

    Needed for merging models of different methods. Not inherited.
    """
    fallback_options: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Sets of options of a fallback, each of which needs different entries of the state."""
    unmergeable_rows: ClassVar[str] = ""
    """Why the head rows of one class in two models cannot be averaged; empty if they can."""

    def setup(self, net: Net, context: Context) -> None:
        """Attach the network and the training context; called once, before weights are loaded."""
        self.check(net.backbone)
        self.check_train(context.train, net.backbone)
        if self.frozen_backbone:
            net.backbone.requires_grad_(False)
        self.net = net
        self.context = context
        self.cached_features = CachedFeatures(net, context)
        self.facts: dict[str, Any] = {}
        self.running: dict[str, Callable[[], float]] = {}
        self.still = False
        self.remembered: Tensor | None = None
        self.task: Task

    def check(self, backbone: nn.Module) -> None:
        """Raise if the method cannot work with a backbone; called before any work."""
        if self.needs_vit and (problem := incompatibility(backbone)):
            raise CofimaError(f"{self.label} needs a vision transformer with a class token; {problem}")

    @classmethod
    def check_train(cls, train: TrainOptions, backbone: nn.Module | None = None) -> None:
        """Raise if the method cannot be trained with these options; called before any work."""
        if train.head_init != "random" and (cls.fixed_features or not cls.sees_features_only):
            kind = "trains no head" if cls.fixed_features else "has a head on features of its prompts"
            raise CofimaError(f"train.head_init = {train.head_init}: {cls.label} {kind}; leave it out")
        lora = cls.lora_options(train)
        if not lora.rank:
            return
        if cls.frozen_backbone or cls.fixed_features:
            problem = f"{cls.label} does not train the backbone; leave it out"
        elif cls.optimizer is not Method.optimizer:
            problem = f"{cls.label} has an optimizer of its own, which moves whole weights; leave it out"
        else:
            problem = ""
        if problem:
            raise CofimaError(f"train.lora.rank = {lora.rank}: {problem}")
        if backbone is not None and (problem := lora_problem(backbone, lora)):
            raise CofimaError(problem)

    @classmethod
    def lora_options(cls, train: TrainOptions) -> LoraOptions:
        """Return the LoRA options: those given in ``train``, completed by the method's defaults."""
        return train.lora.over(cls.default_lora)

    def stream(self, stream: Stream) -> Stream:
        """Return the stream that this method learns, such as all tasks merged into one."""
        return stream

    def first_task_key(self) -> tuple[Any, ...] | None:
        """Return everything, apart from shared settings, that the state after the first task depends on.

        Two methods with the same key end their first task bit-identically, so a grid trains it only once;
        with None, nothing is shared. A key is not inherited: see :func:`cofima.methods.first_task_key`.
        """
        return None

    def cost(self, plan: Plan) -> Cost:
        """Return the cost of a run in passes through the network; by default that of plain training."""
        if self.fixed_features:  # features are cached: one pass per image
            return Cost(0, plan.train + plan.test)
        initial = plan.train if plan.solved_rows else 0
        return Cost(plan.epochs * plan.train, plan.test * (plan.tasks + 1) / 2 + initial)

    def learn(
        self,
        task: Task,
        *,
        context: Context | None = None,
        hooks: Hooks = NO_HOOKS,
        train: Phase | None = None,
        end: Phase | None = None,
        still: bool = False,
    ) -> None:
        """Learn a task, starting from the state after the previous one.

        Args:
            task: The task.
            context: Replacement for the context given to :meth:`setup`, from now on.
            hooks: Callbacks of the training.
            train: Replacement for :meth:`train`, with which analyses observe it or load a stored result.
            end: Replacement for :meth:`end`.
            still: Keep the backbone frozen and only solve the head by :meth:`fit_head`; for methods whose
                head :attr:`is_solved`. ``remembered`` then holds the features of the images.
        """
        if still:
            train, end = self.keep_still, self.fit_head
        self.still, self.context = still, context or self.context
        self.check_train(self.context.train, self.net.backbone)
        self.task, self.facts = task, {"seconds": {}, "notes": [], "lam": None}
        # Dropout and the like draw from the global generators. These are seeded for each task, so that a
        # resumed run draws the same numbers, and restored afterwards, so that the caller's are unaffected.
        gpus = [self.context.device] if self.context.device.type == "cuda" else []
        with torch.random.fork_rng(gpus), self.timed("total"), self.timed("cpu", time.process_time):
            number = self.context.seeds.number("torch", task.index)
            # + rank: the shards of a batch must not share their dropout masks
            seed_global(number + distributed.rank(), self.context.device)
            self.begin(task)
            if not still:
                self.init_head(task)
            if train is None:
                self.train(task, hooks)
            else:
                train(task)
            self.cached_features.invalidate()  # training may have changed the backbone
            (end or self.end)(task)
            distributed.broadcast_weights(self.net, self.head())

    def keep_still(self, task: Task) -> None:
        """Train nothing."""
        self.net.eval()

    def solved_head(self, state: Mapping[str, Tensor], width: int) -> tuple[Tensor, Tensor] | None:
        """Return weight and bias of the head if the state alone determines them, otherwise None.

        Used to merge models that have the same backbone.

        Args:
            state: As :meth:`state` returns it.
            width: Number of features.
        """
        return None

    @property
    def is_solved(self) -> bool:
        """True if :meth:`fit_head` solves the whole head, and :meth:`left_out_logits` is implemented."""
        return False

    def begin(self, task: Task) -> None:
        """Prepare for the task: add rows to the head and freeze the old ones."""
        if task.known:
            self.net.head.requires_grad_(False)
            return
        generator = self.context.seeds.generator("head", task.index)
        self.net.grow(len(task.classes), generator, freeze=self.frozen_old_heads)

    def init_head(self, task: Task) -> None:
        """Set the head rows of new classes as ``train.head_init`` says; they are random so far."""
        if self.context.train.head_init == "random" or len(task.classes) < 2:
            return
        with self.timed("statistics"):
            labels = task.train.labels - task.classes.start
            rows = discriminant_rows(self.initial_features(task), labels, len(task.classes))
        if rows is None:
            self.note("head_init=lda: too few images to solve the rows of new classes; they begin at random")
            return
        flat = self.net.head.flat()
        for key, values in rows.items():
            flat[key][task.classes.start : task.classes.stop] = values
        self.net.head.load_flat(**flat)

    def initial_features(self, task: Task) -> Tensor:
        """Return the features of the task's images before training."""
        return self.features(task.train)

    def train(self, task: Task, hooks: Hooks = NO_HOOKS) -> None:
        """Run the training loop on the task's images."""
        if task.known:
            self.refine(task, hooks)
            return
        if len(task.classes) == 1 and task.index == 0:
            self.note(
                "the first task has one class: there is nothing to tell apart yet, so nothing is trained"
            )
            self.net.eval()  # as after training: test images must not change batch statistics
            return
        freeze = len(task.classes) == 1 and self.context.train.freeze_backbone_on_single_class
        with self.timed("train"), frozen(self.net.backbone, freeze), self.low_rank(task) as factors:
            sgd(
                self.net,
                self.data(task),
                self.loss,
                self.context,
                task.index,
                after_step=self.after_step,
                optimizer=self.optimizer(),
                hooks=hooks,
                factors=factors,
            )

    def refine(self, task: Task, hooks: Hooks = NO_HOOKS) -> None:
        """Train the backbone and the head rows of known classes on more images of these classes."""
        if len(task.known) == 1:
            self.note("more images of one known class: there is nothing to tell apart, so nothing is trained")
            self.net.eval()
            return
        # A temporary head with the rows of these classes only: the others have no images here, and would only
        # be pushed down.
        whole, rows = self.net.head, torch.tensor(task.known)
        self.net.head = Head(whole.features, [len(rows)]).to(self.context.device)
        self.net.head.load_flat(**{key: value[rows] for key, value in whole.flat().items()})
        among = replace(task.train, labels=torch.searchsorted(rows, task.train.labels))
        with self.timed("train"), self.low_rank(task) as factors:
            # Early stopping evaluates all classes, but this temporary head has only some of their rows.
            hooks = replace(hooks, stop=None)
            sgd(self.net, among, self._refine_loss, self.context, task.index, hooks=hooks, factors=factors)
        flat = whole.flat()
        for key, value in self.net.head.flat().items():
            flat[key][rows] = value
        whole.load_flat(**flat)
        self.net.head = whole

    def _refine_loss(self, batch: Batch) -> Tensor:
        return self.criterion(self.net(batch.images), batch.labels)

    def low_rank(self, task: Task) -> AbstractContextManager[LowRank]:
        """Return the context manager that trains the backbone by new LoRA factors; a no-op without LoRA."""
        generator = self.context.seeds.generator("lora", task.index)
        return low_rank(self.net.backbone, self.lora_options(self.context.train), generator)

    def data(self, task: Task) -> Images:
        """Return the images to train on."""
        return task.train

    def optimizer(self) -> Optimizer | None:
        """Return the optimizer of a task, or None for SGD with the learning rates of ``train``."""
        return None

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch; by default :meth:`local_loss`."""
        return self.local_loss(self.net(batch.images), batch.labels)

    def local_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the criterion over the logits of the current task only.

        With a single new class it would always be 0, so the logits of all classes seen are used instead.
        """
        first = self.task.classes.start if len(self.task.classes) > 1 else 0
        return self.criterion(logits[:, first:], labels - first)

    def criterion(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of logits over images; by default cross-entropy."""
        return cross_entropy(logits, labels)

    def after_step(self, batch: Batch) -> None:
        """Run after each optimizer step, with the batch of the step."""

    def end(self, task: Task) -> None:
        """Finish the task: merge weights, store class statistics, align the head."""

    def fit_head(self, task: Task) -> None:
        """Compute the class statistics of the task with the current weights, then align the head."""

    def head(self) -> Head:
        """Return the head used for prediction."""
        return self.net.head

    def load_head(self, weight: Tensor, bias: Tensor) -> None:
        """Load the weights of the head used for prediction; ``net.head`` already has its blocks."""
        self.net.head.load_flat(weight, bias)

    def left_out_logits(self, features: Tensor, labels: Tensor) -> Tensor | None:
        """Return leave-one-out logits of images that the head was computed from.

        ``features`` are those of the current backbone. None if the method does not support it.
        """
        return None

    def class_shares(self) -> Tensor | None:
        """Return the prior probability of each class; None if all are equal."""
        return None

    def class_statistics(self) -> "Gaussians | None":
        """Return the Gaussian of every class, or None if the method stores none."""
        return None

    def predict(self, images: Tensor) -> Tensor:
        """Return the logits of all classes seen, for preprocessed images without augmentation."""
        logits: Tensor = self.head()(self.net.features(images))
        return logits

    def score(self, seen: Sequence[Task]) -> Score:
        """Evaluate on the test images of the tasks seen so far."""
        if self.fixed_features:
            return evaluate(self.head(), seen, self.context, self.cached_features.batches)
        return evaluate(self.predict, seen, self.context)

    @torch.inference_mode()
    def features(self, images: Images) -> Tensor:
        """Return the features of images, in order, on the CPU; raise if one is not finite."""
        if self.fixed_features:
            found = self.cached_features(images)
        else:
            self.net.eval()
            part = distributed.current_shard(len(images))
            pairs = plain_batches(images, self.context, "features", part)
            found = part.gather(torch.cat([self.net.features(x).float().cpu() for x, _ in pairs]))
        if bad := int((~found.isfinite().all(1)).sum()):
            # statistics of such features could never be solved for a head
            raise CofimaError(
                f"the backbone gives features that are not finite for {bad} of {len(found)} images: its "
                "weights hold NaN or Inf, or are so large that it overflows; check its checkpoint"
            )
        return found

    def note(self, text: str) -> None:
        """Show a message about this task to the user, and record it in the history."""
        self.facts["notes"].append(text)
        self.context.progress.say(text)

    def entries(self) -> tuple[Entry, ...]:
        """Return the entries of ``state_schema`` that a model with these options can have."""
        return self.state_schema

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that the next task needs, apart from the backbone and the prediction head."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`state`; the backbone and the prediction head are already loaded."""

    def task_state(self) -> dict[str, Tensor]:
        """Return the tensors, apart from the network, that training steps change, for a mid-task checkpoint.

        A resumed run calls :meth:`begin` again, which is deterministic given the previous state and the
        seed; only later changes are returned here. Random number generators that are attributes of the
        method are included.
        """
        streams = {name: chance.get_state() for name, chance in self._streams().items()}
        return tagged("stream", streams) | (self.state() if self.steps_change_state else {})

    def restore_task_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`task_state`; called after :meth:`begin`."""
        kept = untagged("stream", state)  # may include generators left over from earlier tasks
        for name, chance in self._streams().items():
            if name in kept:
                chance.set_state(kept[name])
        if self.steps_change_state:
            self.restore({key: value for key, value in state.items() if not key.startswith("stream.")})

    def _streams(self) -> dict[str, torch.Generator]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Generator)}

    @contextmanager
    def timed(self, phase: str, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
        """Time a phase of the task, for the history."""
        start = clock()
        self.running[phase] = lambda: clock() - start
        try:
            yield
        finally:
            self.add_seconds({phase: self.running.pop(phase)()})

    def seconds_so_far(self) -> dict[str, float]:
        """Return the seconds of each phase so far, including those still running."""
        seconds: dict[str, float] = self.facts["seconds"]
        return seconds | {phase: seconds.get(phase, 0.0) + now() for phase, now in self.running.items()}

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Add seconds to phases of the task."""
        mine = self.facts["seconds"]
        mine |= {phase: mine.get(phase, 0.0) + value for phase, value in seconds.items()}
