"""Gradients of gradients equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.comm import plan_exchange
from hyperslab.comm.exchange import fetch
from tests.ops.convolution import test_conv, test_conv_transpose
from tests.ops.serial import RANKS, Example, average, compare, distance, draw_examples
from tests.ranks import run_ranks
from tests.selection import by_rotation

COVERS = {"autograd": {"grad"}}


def penalised(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The squared gradients of a function of an operator's output, which is not linear in it."""

    def op(x: Any, *weights: Any, **options: Any) -> Any:
        y = operator(x, *weights, **options)
        (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return gradient**2

    return op


def conv(x: Any, *weights: Any, **options: Any) -> Any:
    return penalised(test_conv.conv)(x, *weights, **options)


def transposed(x: Any, *weights: Any, **options: Any) -> Any:
    return penalised(test_conv_transpose.transposed)(x, *weights, **options)


def padded(x: Any, weight: torch.Tensor, **options: Any) -> Any:
    return penalised(lambda x, w, **options: F.conv3d(F.pad(x, **options), w))(x, weight, **options)


@pytest.mark.parametrize("ranks", RANKS)
def test_any_convolution(ranks: int) -> None:
    run_ranks(ranks, compare, conv, draw_examples(test_conv.examples(ranks), 25))


@pytest.mark.parametrize("ranks", RANKS)
def test_any_transposed_convolution(ranks: int) -> None:
    run_ranks(ranks, compare, transposed, draw_examples(test_conv_transpose.examples(ranks), 20))


def check_fetch() -> list[bool]:
    """The gradient of a fetch's gradient with respect to what came in is the fetch itself."""
    grid = hs.Grid(depth=3)
    partition = grid.partition((1, 1, 7, 2, 2))
    cover = partition.without(["depth"]).cover  # everybody asks for everything
    plan = plan_exchange(partition, cover, grid)
    x = torch.randn(partition.box(grid.coords).shape, dtype=torch.float64, requires_grad=True)
    v = torch.randn((1, 1, 7, 2, 2), dtype=torch.float64, requires_grad=True)
    u = torch.randn_like(x)
    (xt,) = torch.autograd.grad(fetch(x, plan, what="test"), x, v, create_graph=True)
    (back,) = torch.autograd.grad(xt, v, u)
    return [torch.equal(back, fetch(u, plan, what="test"))]


def test_the_adjoint_of_the_adjoint() -> None:
    assert run_ranks(3, check_fetch) == [[True]] * 3


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding(mode: str) -> None:
    cases = [
        Example(
            grid=grid,
            shape=(2, 2, 7, 5, 4),
            weights=((2, 2, 3, 2, 3),),
            options={"pad": (1, 1, 0, 2, 2, 1), "mode": mode},
        )
        for grid in ({"depth": 4}, {"data": 2, "height": 2}, {"depth": 2, "width": 2})
    ]
    run_ranks(4, compare, padded, cases)


def gradient_has_a_graph(mode: str) -> list[bool]:
    """Serially and cut, where only the first rank pads."""
    x = torch.ones(1, 1, 4, 3, 3, requires_grad=True)
    found = []
    for leaf in (x, hs.shard(x, hs.Grid(depth=2))):
        y = F.pad(leaf, (0, 0, 0, 0, 1, 0), mode)
        (gradient,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        found.append(gradient.requires_grad)
    return found


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_all_ranks_have_the_graph_of_padding(mode: str) -> None:
    assert run_ranks(2, gradient_has_a_graph, mode) == [[True, True]] * 2


class Critic(nn.Module):
    """Strides, a bias, an activation with a second derivative; a score per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(2, 4, 3, padding=1),
            nn.SiLU(),
            nn.Conv3d(4, 4, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.AvgPool3d(2),
            nn.Conv3d(4, 4, 3, padding=1),
            nn.Tanh(),
        )
        self.score = nn.Linear(4 * 2 * 2 * 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.layers(x).flatten(1))


def penalty_by_grad(critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As in Gulrajani et al. 2017 and the many copies of its code."""
    x = x.requires_grad_(True)
    score = critic(x)
    gradients = torch.autograd.grad(
        outputs=score,
        inputs=x,
        grad_outputs=torch.ones_like(score),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return (((gradients**2).sum(1) + 1e-12).sqrt() - 1).pow(2).mean()


def penalty_of_sum(critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of one number and one input; the squares are added without leaving the cut."""
    x = x.requires_grad_(True)
    (gradients,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return gradients.square().sum((1, 2, 3, 4)).mean()


PENALTIES = [penalty_by_grad, penalty_of_sum]


def step(axes: dict[str, int] | None, penalty: Callable[..., Any]) -> list[torch.Tensor]:
    """One critic step of a Wasserstein GAN: loss and gradients."""
    torch.manual_seed(0)
    real, fake = (torch.randn(4, 2, 9, 8, 8, dtype=torch.float64) for _ in range(2))
    critic = Critic().double()
    if axes is not None:
        grid = hs.Grid(**axes)
        critic = hs.parallelize(critic, grid)  # type: ignore[assignment]
        real, fake = hs.shard(real, grid), hs.shard(fake, grid)
    mix = torch.linspace(0.1, 0.9, 4, dtype=torch.float64).view(4, 1, 1, 1, 1)
    between = (mix * real + (1 - mix) * fake).detach()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, between)
    loss.backward()
    return [loss.detach(), *(p.grad for p in critic.parameters() if p.grad is not None)]


PENALISED = [{"depth": 4}, {"data": 2, "width": 2}, {"depth": 2, "height": 2}]


@pytest.mark.parametrize(("axes", "penalty"), by_rotation(PENALISED, PENALTIES))
def test_a_gradient_penalty_is_the_serial_one(
    axes: dict[str, int], penalty: Callable[..., Any]
) -> None:
    expected = step(None, penalty)
    for found in run_ranks(4, step, axes, penalty):
        assert len(found) == len(expected)
        errors = [distance(a, b) for a, b in zip(found, expected, strict=True)]
        assert max(errors) <= 1e-10


class Adapted(nn.Module):
    """Takes steps of its own before it answers, and shows the style that it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 3, padding=1)
        self.latent = nn.Parameter(torch.randn(2, 4))
        self.style = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight: torch.Tensor = self.conv.weight
        for _ in range(2):
            loss = F.conv3d(x, weight, padding=1).square().mean()
            (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
            weight = weight - 0.5 * gradient
        latent = self.latent.tanh()
        return F.conv3d(x * self.style(latent)[..., None, None, None], weight), latent


def adapted(kind: type[nn.Module], axes: dict[str, int] | None) -> tuple[nn.Module, Any]:
    """Return a network of that kind and what it gives, cut along the axes."""
    torch.manual_seed(0)
    net: nn.Module = kind().double()
    x = torch.randn(2, 2, 7, 6, 4, dtype=torch.float64)
    if axes is None:
        return net, net(x)
    grid = hs.Grid(**axes)
    return hs.parallelize(net, grid), net(hs.shard(x, grid))


def adapt(axes: dict[str, int] | None) -> list[Any]:
    """Steps within a forward (Finn et al. 2017) and the length of paths (Karras et al. 2020)."""
    net, (y, latent) = adapted(Adapted, axes)
    (slope,) = torch.autograd.grad(y.sum(), latent, create_graph=True)
    ((slope.norm(dim=1) - 1).square().mean() + y.square().mean()).backward()
    return [slope.detach(), *(p.grad for p in net.parameters())]


def test_gradients_of_what_a_forward_computed_of_its_parameters() -> None:
    expected = adapt(None)
    for found in run_ranks(2, adapt, {"depth": 2}):
        assert [one is None for one in found] == [one is None for one in expected]
        pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
        assert max(distance(a, b) for a, b in pairs) <= 1e-10


class Recomputed(Adapted):
    """Takes its steps once more in the backward pass."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = checkpoint(
            super().forward, x, use_reentrant=False
        )
        return found


def recompute(axes: dict[str, int] | None, kind: type[Adapted]) -> list[Any]:
    net, (y, _) = adapted(kind, axes)
    y.square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_gradients_asked_within_a_forward_that_is_recomputed() -> None:
    expected = recompute(None, Adapted)
    for found in run_ranks(2, recompute, {"depth": 2}, Recomputed):
        assert max(distance(a, b) for a, b in zip(found, expected, strict=True)) <= 1e-10


def by_backward() -> list[float]:
    """backward(create_graph=True), x.grad, and then a second backward; without averaging."""
    torch.manual_seed(0)
    full = torch.randn(2, 2, 9, 8, 8, dtype=torch.float64)
    found = []
    for grid in (None, hs.Grid(depth=2)):
        torch.manual_seed(1)
        critic = Critic().double()
        x = full.clone() if grid is None else hs.shard(full, grid)
        x.requires_grad_(True)
        critic(x).sum().backward(create_graph=True)
        gradient, x.grad = x.grad, None
        critic.zero_grad()
        gradient.square().sum().backward()
        found.append([p.grad if grid is None else average(p.grad) for p in critic.parameters()])
    return [distance(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_the_gradient_of_a_leaf_keeps_its_graph() -> None:
    assert max(map(max, run_ranks(2, by_backward))) <= 1e-10


def mixed() -> list[float]:
    """Several outputs and inputs, ordinary and cut, some not used."""
    grid, full = hs.Grid(data=2, depth=2), torch.randn(2, 1, 6, 4, 4, dtype=torch.float64)
    found = []
    for cut in (torch.clone, lambda x: hs.shard(x, grid)):
        weight = torch.full((2, 1, 3, 3, 3), 0.3, dtype=torch.float64, requires_grad=True)
        x, unused = cut(full).requires_grad_(True), cut(full).requires_grad_(True)
        y = F.conv3d(x, weight, padding=1)
        outputs = [y, (y**2).mean(), y.sum((2, 3, 4))]
        weights = [torch.sin(y).detach(), None, torch.full((2, 2), 1.5, dtype=torch.float64)]
        got = torch.autograd.grad(outputs, [x, weight, unused], weights, allow_unused=True)
        assert got[2] is None
        found.append([g.full() if isinstance(g, hs.Sharded) else g for g in got[:2]])
    return [distance(a, b) for a, b in zip(*found, strict=True)]


def test_several_outputs_and_inputs() -> None:
    assert max(map(max, run_ranks(4, mixed))) <= 1e-10


def some_inputs() -> None:
    """A leaf, what is computed of it, and a weight get gradients; the other weight does not."""
    full = torch.randn(2, 2, 5, 4, 3, dtype=torch.float64)
    grid = hs.Grid(depth=3)
    found = []
    for cut in (lambda t: t.clone(), lambda t: hs.shard(t, grid)):
        weight, other = (torch.full((2, 1, 1, 1), 0.3).double().requires_grad_() for _ in range(2))
        x = cut(full).requires_grad_()
        y = (x * weight).sin()
        (y * other).square().sum().backward(inputs=[x, y, weight])
        assert other.grad is None
        gradients = (x.grad, y.grad, weight.grad)
        found.append([g.full() if isinstance(g, hs.Sharded) else g for g in gradients])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_backward_of_some_inputs() -> None:
    run_ranks(3, some_inputs)


def one_number() -> None:
    """Parts of the output, by each of torch's ways, with weights, and what they depend on."""
    full = torch.randn(2, 2, 5, 4, 3, dtype=torch.float64)
    grid = hs.Grid(depth=2)
    found = []
    for parallel in (False, True):
        torch.manual_seed(0)
        net = nn.Conv3d(2, 2, 3, padding=1).double()
        net = hs.parallelize(net, grid) if parallel else net
        x = (hs.shard(full, grid) if parallel else full.clone()).requires_grad_()
        net(x)[1, 0, 4, 3, 2].backward()
        net(x)[0, 0, 0, 0, :1].backward(torch.tensor([3.0], dtype=torch.float64))
        torch.autograd.backward([net(x)[0, 1, 2, 2, 2], net(x).square().mean()])
        net(x).sin().backward(full + 1)  # and volumes with their gradients
        y = net(x)
        torch.autograd.backward([y.cos(), y.mean()], [torch.ones_like(y), None])
        alone = (hs.shard(full, grid) if parallel else full.clone()).requires_grad_()
        alone.sin()[1, 1, 4, 3, 2].backward(inputs=alone)
        gradients = [x.grad, alone.grad, net.weight.grad, net.bias.grad]
        found.append([g.full() if isinstance(g, hs.Sharded) else g for g in gradients])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_backward_of_one_number() -> None:
    run_ranks(2, one_number)


def derivatives() -> bool:
    """What torch computes with nothing but its own grad."""
    full = torch.randn(2, 2, 3, 1, 1, dtype=torch.float64)
    cut = hs.shard(full, hs.Grid(depth=2))

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x**3).sum() + 5 * x.mean() ** 2

    found = torch.autograd.functional.hessian(function, cut)
    return torch.allclose(found.full(), torch.autograd.functional.hessian(function, full))


def test_hessian() -> None:
    assert run_ranks(2, derivatives) == [True, True]


def cut() -> Any:
    return hs.shard(torch.randn(2, 2, 6, 6, 6), hs.Grid(depth=2)).requires_grad_(True)


def twice() -> None:
    """A graph of gradients that DistributedDataParallel would average."""
    model = hs.parallelize(nn.Conv3d(2, 1, 3), hs.Grid(depth=2))
    model(cut()).square().sum().backward(create_graph=True)


def penalty_alone() -> None:
    """The last bias has no part in it: no gradient, as in serial torch."""
    grid = hs.Grid(depth=2)
    torch.manual_seed(0)
    serial = Critic()
    critic = Critic()
    critic.load_state_dict(serial.state_dict())
    hs.parallelize(critic, grid)
    x = torch.randn(2, 2, 9, 8, 8)
    penalty_of_sum(serial, x).backward()
    penalty_of_sum(critic, hs.shard(x, grid)).backward()
    for got, want in zip(critic.parameters(), serial.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None)
        assert got.grad is None or torch.allclose(got.grad, want.grad, atol=1e-6)
    assert sum(p.grad is None for p in critic.parameters()) == 1


def test_a_penalty_alone() -> None:
    run_ranks(2, penalty_alone)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.autograd.grad(cut() * 2, cut()), "only for scalar outputs"),
    (
        lambda: torch.autograd.grad(cut() * 2, cut(), torch.ones(2, 2, 3, 6, 6)),
        "the global shapes of an output",
    ),
    (
        lambda: torch.autograd.grad(cut() * 2, cut(), torch.ones(1), is_grads_batched=True),
        "grad has no rule for a cut tensor",
    ),
    (lambda: cut().sum(1).backward(), "backward has no rule"),
    (lambda: cut().sum(1).backward(torch.ones(6, 6, 6)), "the global shapes of an output"),
    (twice, r"backward\(create_graph=True\) through Conv3d"),
]


def refused(case: int) -> None:
    REFUSED[case][0]()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_refused(case: int) -> None:
    with pytest.raises((RuntimeError, hs.UnsupportedOp, hs.LayoutError), match=REFUSED[case][1]):
        run_ranks(2, refused, case)


def weighed(shard: Callable[[torch.Tensor], Any]) -> list[torch.Tensor | None]:
    """Begin with gradients that have a graph; a Jacobian product by two backward passes."""
    torch.manual_seed(0)
    values, direction = torch.randn(2, 2, 1, 5, 2, 3, dtype=torch.float64)
    results: list[Any] = []
    for start in (lambda y, x, u: y, lambda y, x, u: x * 2, lambda y, x, u: u):
        leaf, weight = (shard(t).requires_grad_() for t in (values.clone(), direction.clone()))
        y = leaf**3
        y.backward(start(y, leaf, weight), create_graph=start(y, leaf, weight) is y)
        results += [leaf.grad, weight.grad]
    leaf, weight = (shard(t).requires_grad_() for t in (values, torch.ones_like(values)))
    (product,) = torch.autograd.grad(leaf**3, leaf, weight, create_graph=True)
    results += torch.autograd.grad(product, weight, shard(direction))
    return [r.full() if isinstance(r, hs.Sharded) else r for r in results]


def weighed_on_a_grid() -> list[torch.Tensor | None]:
    grid = hs.Grid(depth=2)
    return [r if r is None else r.detach() for r in weighed(lambda x: hs.shard(x, grid))]


@pytest.mark.filterwarnings("ignore:Using backward")  # of create_graph
def test_gradients_that_are_handed_in_may_have_a_graph() -> None:
    for found in run_ranks(2, weighed_on_a_grid):
        for one, serial in zip(found, weighed(lambda x: x), strict=True):
            assert distance(one, serial) < 1e-12
