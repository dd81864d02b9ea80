"""The one-pass Fisher information equals the obvious loop, for every model and every parameter."""

import itertools

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from cofima.core.errors import CofimaError
from cofima.weights.fisher import diagonal, verify
from cofima.weights.fisher.diagonal import Weights, diagonal_fisher
from cofima.weights.fisher.kernels import add_products
from cofima.weights.fisher.labels import Labels
from cofima.weights.fisher.per_sample import add_batch

CLASSES = 5


@pytest.fixture(autouse=True)
def _rules_for_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute batches of few samples by the rules, too: these are what is tested here."""
    monkeypatch.setattr(diagonal, "FEW", 1)


def one_by_one(model: nn.Module, images: Tensor, targets: Tensor, columns: slice = slice(None)) -> Weights:
    """Return the mean squared gradient by a loop that nobody can doubt."""
    model.eval()
    params = dict(model.named_parameters())
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    for x, y in zip(images, targets, strict=True):
        loss = functional.cross_entropy(model(x[None])[:, columns], y[None] - (columns.start or 0))
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        for name, grad in zip(params, grads, strict=True):
            sums[name] += 0 if grad is None else grad.square()
    return {name: total / len(images) for name, total in sums.items()}


def assert_same(found: Weights, expected: Weights, rtol: float = 1e-9) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        scale = float(values.abs().max())
        torch.testing.assert_close(
            found[name], values, rtol=rtol, atol=rtol * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


def data(count: int = 5, size: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, size, size, generator=g, dtype=torch.float64)
    return images, torch.randint(CLASSES, (count,), generator=g)


def vectors(count: int = 6, width: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(count, width, generator=g, dtype=torch.float64)
    return values, torch.randint(CLASSES, (count,), generator=g)


def seeded(build, *args, **options) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = build(*args, **options).double()
        for p in model.parameters():  # zero-initialized branches would hide mistakes
            p.data += 0.02 * torch.randn_like(p)
        return model


def vit(**options) -> nn.Module:
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return seeded(VisionTransformer, num_classes=CLASSES, **shape, **options)


def from_timm(name: str, **options) -> nn.Module:
    return seeded(timm.create_model, name, num_classes=CLASSES, **options)


NETS = {
    "class token": lambda: vit(),
    "registers and LayerScale": lambda: vit(reg_tokens=4, init_values=0.1),
    "registers without position": lambda: vit(reg_tokens=4, no_embed_class=True),
    "average pooling": lambda: vit(class_token=False, global_pool="avg"),
    "dynamic size": lambda: vit(dynamic_img_size=True),
    "resnet": lambda: from_timm("resnet10t"),
    "convnext": lambda: from_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "efficientnet lite": lambda: from_timm("tf_efficientnet_lite0"),
}


@pytest.fixture
def no_fallback(monkeypatch):
    """Fail where a parameter is left to the slow way, which would hide a wrong rule."""

    def refuse(model, names, *args):
        pytest.fail(f"not covered by rules: {sorted(names)}")

    monkeypatch.setattr(diagonal, "add_each", refuse)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("kind", NETS)
def test_equals_the_loop_without_any_fallback(kind):
    net, (images, targets) = NETS[kind](), data(count=3)  # one more than are compared
    assert_same(diagonal_fisher(net, [(images, targets)]), one_by_one(net, images, targets))


class Convolutions(nn.Module):
    """One of each: strided, dilated, grouped, depthwise with a multiplier, even kernel, reflected edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 8, 3, dilation=2, padding=(2, 1), groups=2),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 16, (3, 5), padding="same", groups=8),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 6, 4, padding="same"),
            nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect", bias=False),
            nn.Conv2d(6, 8, 1, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_kind_of_convolution(channels_last):
    net, (images, targets) = seeded(Convolutions), data(size=17)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    assert_same(diagonal_fisher(net, [(images, targets)]), one_by_one(net, images, targets))


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [9, 21])  # on small maps, and on those where the memory format decides
def test_depthwise_convolutions_on_maps_of_any_size(size, channels_last):
    net = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.Conv2d(4, 4, 5, stride=2, padding=(2, 1), groups=4, bias=False),
            nn.Conv2d(4, 4, (1, 2), dilation=2, groups=4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, CLASSES),
        )
    )
    images, targets = data(size=size)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    assert_same(diagonal_fisher(net, [(images, targets)]), one_by_one(net, images, targets))


def test_rows_without_gradient_are_left_out_only_if_no_sample_has_one():
    g = torch.Generator().manual_seed(0)
    grad, given = torch.randn(3, 5, 4, generator=g), torch.randn(3, 5, 2, generator=g)
    grad[:, -1] = 0
    grad[0, :3] = grad[1, 1:] = 0
    total = torch.zeros(4, 2)
    add_products(grad, given, total)
    torch.testing.assert_close(total, torch.einsum("bto,bti->boi", grad, given).square().sum(0))


class Odd(nn.Module):
    """A model with one thing that the rules do not expect; each kind is a method."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.bare = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(3))
        if kind == "shared_weight":
            self.b.weight = self.a.weight
        if kind == "parametrized":
            nn.utils.parametrizations.weight_norm(self.a)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return self.head(getattr(self, self.kind)(torch.tanh(self.b(x))))

    def gate(self, x: Tensor) -> Tensor:
        """Return 0 for the first two vectors and 1 for others."""
        first = vectors()[0][:2, 0]
        return (~torch.isin(self.seen[:, :1], first)).to(x)

    def shared_weight(self, x: Tensor) -> Tensor:
        return self.a(x)

    parametrized = shared_weight

    def called_twice(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.a(x)))

    def functional_use(self, x: Tensor) -> Tensor:
        return self.a(x) + 1e-3 * (x @ self.a.weight.exp())

    def invisible_use(self, x: Tensor) -> Tensor:
        return self.a(x) + Invisible.apply(x, self.a.bias)

    def only_invisible(self, x: Tensor) -> Tensor:
        return self.a(x) + Invisible.apply(x, self.bare)

    def invisible_at_first(self, x: Tensor) -> Tensor:
        return self.a(x) + Invisible.apply(x * self.gate(x), self.a.bias)

    def bare_parameter(self, x: Tensor) -> Tensor:
        return self.a(x) * torch.sin(self.bare)

    def bare_product(self, x: Tensor) -> Tensor:
        return self.bare * self.a(x)[:, None].squeeze(1)

    def samples_second(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.sin()])  # (2 tokens, samples, width): as long as the batch it may seem
        return self.a(tokens).prod(0)

    def samples_mixed(self, x: Tensor) -> Tensor:
        return self.a(x - x.mean(0))

    def dead_at_first(self, x: Tensor) -> Tensor:
        return self.a(x) + self.gate(x) * self.b(x)

    def transposed(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.a.weight.t())


class Invisible(torch.autograd.Function):
    """A product with a parameter that torch functions do not see."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * x.new_tensor(p.tolist())

    @staticmethod
    def backward(ctx, grad):
        x, p = ctx.saved_tensors
        return grad * p, (grad * x).sum(0)


KINDS = [name for name in vars(Odd) if not name.startswith("_") and name not in ("forward", "gate")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 6])
def test_what_rules_do_not_cover_is_exact_too(kind, size):
    net = seeded(Odd, kind)
    images, targets = vectors()
    found = diagonal_fisher(net, list(zip(images.split(size), targets.split(size), strict=True)))
    assert_same(found, one_by_one(net, images, targets))
    assert not found["unused"].any()


class Experts(nn.Module):
    """Tokens with a positive first value go to a second expert, from whichever sample they come."""

    def __init__(self, guard: bool) -> None:
        super().__init__()
        self.guard = guard
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        routed = x[..., 0] > 0
        y = self.a(x)
        if routed.any() or not self.guard:
            y = y.index_put((routed,), self.b(x[routed]))
        return self.head(y.sin().sum(1))


@pytest.mark.parametrize("guard", [False, True])
def test_a_part_that_sleeps_at_first_is_exact_when_it_wakes(guard):
    images = vectors(18)[0].view(6, 3, 4)
    images[..., 0] = -1.0
    images[2, :, 0] = images[3, 0, 0] = 1.0  # four tokens, as many as samples then
    targets = vectors()[1]
    net = seeded(Experts, guard)
    found = diagonal_fisher(net, [(images, targets)])
    assert found["b.weight"].any()
    assert_same(found, one_by_one(net, images, targets))


class Growing(nn.Module):
    """A model with settings, and a head of several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.twice = nn.Linear(4, 4), False
        self.blocks = nn.ModuleList([nn.Linear(4, CLASSES)])
        self.branch = nn.Linear(4, 4, bias=False)
        self.weak = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x)) + self.weak * self.branch(x)
        y = Invisible.apply(y, self.a.bias) if self.twice else y
        return torch.cat([block(y) for block in self.blocks], 1)


@pytest.fixture
def compared(monkeypatch):
    """Return the sets of parameters that were compared with the reference, call by call."""
    calls, real = [], verify.add_each
    monkeypatch.setattr(
        verify, "add_each", lambda model, names, *args: calls.append(names) or real(model, names, *args)
    )
    return calls


def test_a_model_is_verified_once(compared):
    net, (images, targets) = vit(), data()
    first = diagonal_fisher(net, [(images, targets)])
    again = diagonal_fisher(net, [(images, targets)])
    assert compared == [set(first)]
    torch.testing.assert_close(again, first, rtol=0, atol=0)  # whether it was verified before changes no bit
    with torch.no_grad():
        net.head.weight *= 2
    assert_same(diagonal_fisher(net, [(images, targets)]), one_by_one(net, images, targets))
    assert len(compared) == 1


def test_what_is_new_in_a_model_is_verified(compared):
    net, (images, targets) = Growing().double(), vectors()

    def check(*names: str) -> None:
        compared.clear()
        assert_same(diagonal_fisher(net, [(images, targets)]), one_by_one(net, images, targets))
        assert compared == ([set(names)] if names else [])

    every = {name for name, _ in net.named_parameters()}
    net.weak.data.zero_()
    check(*every)
    check("branch.weight")  # its gradient was 0, which every rule gets right
    net.weak.data.fill_(0.5)
    check("branch.weight")
    check()
    net.blocks.append(nn.Linear(4, 2).double())
    check("blocks.1.weight", "blocks.1.bias")
    every |= {"blocks.1.weight", "blocks.1.bias"}
    net.twice = True  # a setting: the rules do not see the second use of a bias
    check(*every)
    net.a.register_forward_hook(lambda module, given, out: 2 * out)
    check(*every)
    net.blocks.append(nn.Linear(4, 1).double())
    net.blocks[2].weight = nn.Parameter(net.blocks[1].weight.data[:1].clone())
    net.blocks[0].bias = net.blocks[0].bias  # as before
    check("blocks.2.weight", "blocks.2.bias")


def test_a_new_part_that_uses_old_weights_makes_all_suspect(compared):
    class Tied(nn.Module):
        def __init__(self, other: nn.Linear) -> None:
            super().__init__()
            object.__setattr__(self, "other", other)  # not a part of this module
            self.bias = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + Invisible.apply(x, self.other.bias) + self.bias

    net, (images, targets) = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), vectors()
    diagonal_fisher(net, [(images, targets % 4)])
    net.append(Tied(net[0]))
    found = diagonal_fisher(net, [(images, targets % 4)])
    assert compared[1] == set(found)
    assert_same(found, one_by_one(net, images, targets % 4))


def softmax_regression() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    model = seeded(nn.Linear, 4, CLASSES)
    images, targets = vectors()
    return model, images, targets, model(images).softmax(1).detach()


def test_closed_form_with_labels_of_the_data():
    model, x, targets, p = softmax_regression()
    error = (p - functional.one_hot(targets, CLASSES)).square()
    found = diagonal_fisher(model, [(x, targets)])
    expected = {"weight": error.T @ x.square() / len(x), "bias": error.mean(0)}
    assert_same(found, expected, rtol=1e-12)


def test_closed_form_of_the_exact_expectation():
    model, x, targets, p = softmax_regression()
    spread = p * (1 - p)
    found = diagonal_fisher(model, [(x, targets)], labels="exact")
    assert_same(found, {"weight": spread.T @ x.square() / len(x), "bias": spread.mean(0)}, rtol=1e-12)


def test_exact_is_the_expectation_over_labels_also_of_deep_nets():
    net, (images, _) = vit(), data(3)
    p = net.eval()(images).softmax(1).detach()
    expected = {name: torch.zeros_like(q) for name, q in net.named_parameters()}
    for i, c in itertools.product(range(3), range(CLASSES)):
        for name, square in one_by_one(net, images[i : i + 1], torch.tensor([c])).items():
            expected[name] += p[i, c] * square / 3
    assert_same(diagonal_fisher(net, [(images, torch.zeros(3).long())], labels="exact"), expected)


def test_exact_survives_a_prediction_without_doubt():
    model = nn.Linear(4, CLASSES).double()
    x = torch.full((3, 4), 1e4, dtype=torch.float64)
    found = diagonal_fisher(model, [(x, torch.zeros(3).long())], labels="exact")
    assert found["weight"].isfinite().all()


def test_sampled_converges_to_exact():
    model, x, targets, _ = softmax_regression()
    many = [(x.repeat(2000, 1), targets.repeat(2000))]
    g = torch.Generator().manual_seed(1)
    sampled = diagonal_fisher(model, many, labels="sampled", generator=g)
    exact = diagonal_fisher(model, [(x, targets)], labels="exact")
    assert_same(sampled, exact, rtol=0.05)


def test_sampled_labels_depend_on_the_generator_and_nothing_else():
    model, x, targets, _ = softmax_regression()

    def draw(seed: int, size: int) -> Weights:
        pairs = list(zip(x.split(size), targets.split(size), strict=True))
        g = torch.Generator().manual_seed(seed)
        return diagonal_fisher(model, pairs, labels="sampled", generator=g)

    assert_same(draw(0, 6), draw(0, 4), rtol=1e-12)
    assert not torch.allclose(draw(0, 6)["weight"], draw(1, 6)["weight"])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_does_not_depend_on_the_batch_size(size):
    net, (images, targets) = vit(), data(5)
    pairs = zip(images.split(size), targets.split(size), strict=True)
    assert_same(diagonal_fisher(net, pairs), diagonal_fisher(net, [(images, targets)]))


def test_columns_restrict_the_softmax():
    net, (images, _) = vit(), data(4)
    targets = torch.tensor([2, 3, 3, 2])
    found = diagonal_fisher(net, [(images, targets)], columns=slice(2, 4))
    assert_same(found, one_by_one(net, images, targets, slice(2, 4)))
    assert not found["head.weight"][[0, 1, 4]].any()


def matchings(items: list[int]):
    """Yield every way to deal ``items`` into pairs."""
    if not items:
        yield []
        return
    for i in range(1, len(items)):
        for rest in matchings(items[1:i] + items[i + 1 :]):
            yield [(items[0], items[i]), *rest]


def test_the_batch_form_has_the_mean_that_makes_it_biased():
    model, x, targets, p = softmax_regression()
    count, size = len(x), 2
    parts = [
        diagonal_fisher(model, [(x[list(b)], targets[list(b)]) for b in pairs], estimator="batch")
        for pairs in matchings(list(range(count)))
    ]
    mean = torch.stack([part["weight"] for part in parts]).mean(0)
    exact = diagonal_fisher(model, [(x, targets)])["weight"]
    g = (p - functional.one_hot(targets, CLASSES)).T @ x / count
    law = exact / size + (1 - 1 / size) * (count * g.square() - exact) / (count - 1)
    torch.testing.assert_close(mean, law, rtol=1e-10, atol=1e-12)


def test_the_batch_form_in_train_mode_uses_batch_statistics():
    net, (images, targets) = from_timm("resnet10t"), data(4)
    in_eval = diagonal_fisher(net, [(images, targets)], estimator="batch")
    in_train = diagonal_fisher(net, [(images, targets)], estimator="batch", training=True)
    assert not torch.allclose(in_eval["conv1.0.weight"], in_train["conv1.0.weight"])


def everything(model: nn.Module) -> dict[str, object]:
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "required": [p.requires_grad for p in model.parameters()],
        "flags": [m.training for m in model.modules()],
        "hooks": [list(m._forward_hooks) for m in model.modules()],
        "tensor hooks": [list(p._backward_hooks or {}) for p in model.parameters()],
        "random": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
    }


def busy_net() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.LazyLinear(5))
    net = net.double()
    net(data(2, 8)[0]).sum().backward()
    net[0].eval()
    net[0].bias.requires_grad_(False)
    net[0].register_forward_hook(lambda module, args, out: None)
    net[0].weight.register_hook(lambda grad: grad * 0)
    return net


@pytest.mark.parametrize("options", [{}, {"labels": "sampled"}, {"estimator": "batch", "training": True}])
@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_touched(options, breaks):
    net, (images, targets) = busy_net(), data(3, 8)

    def batches():
        yield images, targets
        torch.rand(3)  # what a loader may do
        if breaks:
            raise RuntimeError("disk on fire")
        yield images, targets

    before = everything(net)
    if breaks:
        with pytest.raises(RuntimeError, match="disk on fire"):
            diagonal_fisher(net, batches(), **options)
    else:
        first = diagonal_fisher(net, batches(), **options)
        assert first["0.weight"].any()  # the user's hook did not mask it
        torch.testing.assert_close(diagonal_fisher(net, batches(), **options), first, rtol=0, atol=0)
    torch.testing.assert_close(everything(net), before, rtol=0, atol=0)


def test_half_precision_is_computed_in_single_and_left_alone():
    net, (images, targets) = vit(), data(3)
    half = vit().bfloat16()
    found = diagonal_fisher(half, [(images.bfloat16(), targets)])
    assert all(p.dtype == torch.bfloat16 for p in half.parameters())
    assert all(f.dtype == torch.float32 for f in found.values())
    single = vit().bfloat16().float()
    assert_same(found, one_by_one(single, images.bfloat16().float(), targets), rtol=1e-3)
    assert diagonal_fisher(net, [(images, targets)])["head.weight"].dtype == torch.float64


def test_autocast_and_inference_mode_outside_change_nothing():
    net, (images, targets) = vit().float(), data(3)
    plain = diagonal_fisher(net, [(images, targets)])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert_same(diagonal_fisher(net, [(images, targets)]), plain, rtol=1e-12)


def test_rules_alone_leave_out_what_they_do_not_understand():
    net, (images, targets) = seeded(Odd, "called_twice").requires_grad_(False), vectors()
    totals = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    labels = Labels("data", slice(None), torch.Generator())
    done, left = add_batch(net, set(totals), images, targets, labels, totals)
    assert left == {"a.weight", "a.bias"}
    assert done == {"b.weight", "b.bias", "head.weight", "head.bias"}
    assert not totals["a.weight"].any()
    assert totals["b.weight"].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "dat"}, "did you mean 'data'"),
        ({"estimator": "sampel"}, "did you mean 'sample'"),
        ({"training": True}, "only for estimator 'batch'"),
        ({"labels": "exact", "estimator": "batch"}, "not defined"),
        ({"columns": slice(0, 4, 2)}, "consecutive"),
        ({"columns": slice(9, 12)}, "select none"),
        ({"columns": slice(0, 1)}, "targets has"),
    ],
)
def test_wrong_choices_are_named(options, message):
    images, targets = vectors()
    with pytest.raises(CofimaError, match=message):
        diagonal_fisher(nn.Linear(4, CLASSES).double(), [(images, targets)], **options)


def test_bad_data_is_named():
    model, (images, targets) = nn.Linear(4, CLASSES).double(), vectors()
    with pytest.raises(CofimaError, match="no samples"):
        diagonal_fisher(model, [])
    with pytest.raises(CofimaError, match=r"batch 1: targets .*\n  7: not a class; the logits cover 0 to 4"):
        diagonal_fisher(model, [(images, targets), (images, targets * 0 + 7)])
    with pytest.raises(CofimaError, match="batch 0: the logits are not finite"):
        diagonal_fisher(model, [(images * float("nan"), targets)])
    with pytest.raises(CofimaError, match="one integer class id"):
        diagonal_fisher(model, [(images, targets[:3])])
    with pytest.raises(CofimaError, match="a pair of tensors"):
        diagonal_fisher(model, [images])
    with pytest.raises(CofimaError, match="must return logits"):
        diagonal_fisher(nn.Unflatten(1, (2, 2)), [(images, targets)])


def test_gradients_that_overflow_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, CLASSES))
    images, targets = vectors()
    with torch.no_grad():
        model[0].weight *= 1e-30
        model[1].weight *= 1e25
    with pytest.raises(CofimaError, match=r"0\.weight: not finite"):
        diagonal_fisher(model, [(images, targets)])
