"""The tensor itself: forms, gradients, refusals (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hyperslab as hs
from hyperslab.geometry import Box, Cut, Partition
from hyperslab.tensor.dispatch import Rule, average_gradient, check_operands
from tests.ranks import run_ranks

GRIDS = [
    {"width": 1},
    {"depth": 2},
    {"data": 2, "width": 2},
    {"depth": 3, "height": 2},
    {"data": 2, "depth": 2, "height": 2},
]


def speaks_globally() -> None:
    x = hs.shard(torch.arange(2.0 * 3 * 7 * 4 * 5).view(2, 3, 7, 4, 5), hs.Grid(depth=3))
    assert x.shape == x.size() == (2, 3, 7, 4, 5)
    assert (x.size(2), x.size(-1), x.dim(), x.ndim, x.ndimension()) == (7, 5, 5, 5, 5)
    assert (x.numel(), x.nelement(), len(x)) == (840, 840, 2)
    assert isinstance(x, torch.Tensor)
    assert type(x.local) is torch.Tensor
    assert (
        tuple(x.local.shape) == x.box.shape == ((2, 3, 3, 4, 5), (2, 3, 2, 4, 5))[x.grid.rank > 0]
    )
    assert x.box == Box((0, 0, [0, 3, 5][x.grid.rank], 0, 0), (2, 3, [3, 5, 7][x.grid.rank], 4, 5))
    assert x.local.data_ptr() == x.local.data_ptr()
    for text in (repr(x), str(x), f"{x}"):
        assert "2 x 3 x 7 x 4 x 5 (dim 2 in 3 by depth)" in text
    assert (x.dtype, x.device.type, x.is_floating_point()) == (torch.float32, "cpu", True)
    assert {x: 1}[x] == 1


def test_it_speaks_globally() -> None:
    run_ranks(3, speaks_globally)


def round_trip(axes: dict[str, int], shape: tuple[int, ...]) -> None:
    full = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    r = torch.randn(shape, dtype=torch.float64)
    x = hs.shard(full, hs.Grid(**axes))
    assert torch.equal(x.full(), full)
    (x.full() * r).sum().backward()
    assert full.grad is not None
    assert torch.allclose(full.grad, r, atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 2, 7, 5, 4), (4, 5, 6, 9), (2, 3, 8), (4, 7), (3,), ()])
@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_shard_and_full(axes: dict[str, int], shape: tuple[int, ...]) -> None:
    run_ranks(math.prod(axes.values()), round_trip, axes, shape)


def leaf_gradient(axes: dict[str, int], shape: tuple[int, ...]) -> None:
    """A leaf's ``.grad`` is this rank's block of the serial gradient, replicated axes or not."""
    full = torch.randn(shape, dtype=torch.float64)
    x = hs.shard(full, hs.Grid(**axes)).requires_grad_()
    assert x.is_leaf
    assert x.grad is None
    (x.full() ** 3).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert torch.allclose(x.grad.full(), 3 * full**2)
    x.grad = None
    assert x.grad is None


@pytest.mark.parametrize("shape", [(3, 2, 7, 5, 4), (4, 5, 6, 9), (4, 7)])
@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_gradient_of_a_leaf(axes: dict[str, int], shape: tuple[int, ...]) -> None:
    run_ranks(math.prod(axes.values()), leaf_gradient, axes, shape)


def changed_in_place(x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients that are changed in place between backward passes, which add to them."""
    changes: list[Callable[[Any], object]] = [
        lambda g: g.mul_(0.5),
        lambda g: g[:, 0].fill_(0.25),
        lambda g: torch.nn.utils.clip_grad_norm_([x], 1.0),
        lambda g: g.zero_(),
        lambda g: g.detach().add_(1),
    ]
    found = []
    step = torch.zeros_like(x, requires_grad=True)  # a leaf of its own
    for change in changes:
        (x**3).sum().backward()
        change(x.grad)
        assert x.grad is not None
        found.append(x.grad.clone())
    for _ in range(2):
        ((x + step) ** 2).sum().backward()
        assert x.grad is not None
        assert step.grad is not None
        step.grad *= 0.5
        x.grad = x.grad + step.grad
    return [*found, x.grad, step.grad]


def changed_gradients(axes: dict[str, int], shape: tuple[int, ...]) -> None:
    full = torch.randn(shape, dtype=torch.float64)
    x = hs.shard(full, hs.Grid(**axes)).requires_grad_()
    pairs = zip(changed_in_place(x), changed_in_place(full.requires_grad_()), strict=True)
    for got, want in pairs:
        assert isinstance(got, hs.Sharded)
        assert torch.allclose(got.full(), want, atol=1e-13)


@pytest.mark.parametrize("shape", [(3, 2, 7, 5, 4), (4, 7)])
@pytest.mark.parametrize("axes", GRIDS[1:4], ids=str)
def test_changes_of_a_gradient_in_place_stay(axes: dict[str, int], shape: tuple[int, ...]) -> None:
    """Attacks that set ``delta.grad.zero_()``, clipping, optimizers that keep gradients."""
    run_ranks(math.prod(axes.values()), changed_gradients, axes, shape)


class Scaled(torch.nn.Module):
    """Multiplies by what it computes of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.exp()


def of_ordinary_leaves(x: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor | None]:
    """Gradients of ordinary tensors, over passes with and without a cut tensor beside them.

    Some meet it themselves, and of some what is computed does, before and behind a network.
    """
    network: torch.nn.Module = Scaled()
    if isinstance(x, hs.Sharded):
        network = hs.parallelize(network, x.grid)
    leaves = [value.clone().requires_grad_() for value in values]
    scale, shift, channel = leaves
    for _ in range(2):
        y = torch.cat([x * scale + shift, torch.addcmul(x, value=0.5, tensor1=x, tensor2=channel)])
        computed = channel.sin()
        y = network(y * computed) * computed + torch.sub(x[:1], other=shift.exp()).mean() * computed
        (y**2).mean().backward()
    (scale**2).sum().backward()
    return [leaf.grad for leaf in (*leaves, *network.parameters())]


def ordinary_leaves(axes: dict[str, int]) -> None:
    full = torch.randn(4, 2, 7, 5, 4, dtype=torch.float64)
    values = (full[0, 0, 0, 0], full.flip(2), full[0, :, :1, :1, :1])
    found = of_ordinary_leaves(hs.shard(full, hs.Grid(**axes)), *values)
    for got, want in zip(found, of_ordinary_leaves(full, *values), strict=True):
        assert got is not None
        assert want is not None
        assert torch.allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("axes", GRIDS[1:4], ids=str)
def test_gradients_of_ordinary_tensors_are_serial(axes: dict[str, int]) -> None:
    """Noise, latents and learned weights of a loss that are no parameters of a module."""
    run_ranks(math.prod(axes.values()), ordinary_leaves, axes)


def contiguity() -> bool:
    """Networks branch on it, so all ranks have to hear the same: rank 0 has all of its planes."""

    def views(x: torch.Tensor) -> list[torch.Tensor]:
        return [x, x.transpose(2, 3), x[:, 0], x[:1], x.flatten(3), x[:, :1].expand_as(x), x.mT * 1]

    full = torch.randn(3, 2, 7, 5, 6)
    x = hs.shard(full, hs.Grid(depth=2))
    assert [v.is_contiguous() for v in views(x)] == [v.is_contiguous() for v in views(full)]
    return x[:, :, :6].is_contiguous()


def test_all_ranks_say_alike_what_is_contiguous() -> None:
    assert run_ranks(2, contiguity) == [False, False]


def gathered_gradient() -> None:
    """Gather, work that repeats, and cut again: the gradient stays the serial one."""
    full = torch.randn(2, 3, 6, 4, 4, dtype=torch.float64, requires_grad=True)
    x = hs.shard(full, hs.Grid(depth=2, height=2))
    y = hs.gather(x, "depth") * 2
    z = (y.redistribute(x.partition) + x).sin()
    z.full().sum().backward()
    assert full.grad is not None
    assert torch.allclose(full.grad, 3 * torch.cos(3 * full.detach()))


def test_gradient_through_gather() -> None:
    run_ranks(4, gathered_gradient)


def refused(case: str) -> None:
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.randn(2, 2, 6, 4, 4), grid)
    if case == "block":
        hs.Sharded.from_local(torch.zeros(2, 2, 4, 4, 4), x.partition, grid)
    elif case == "shape":
        x.redistribute(Partition.whole((2, 2, 6, 4, 5)))
    elif case == "axis":
        hs.gather(x, "deep")
    elif case == "twice":
        hs.shard(x, grid)
    elif case == "thin":
        hs.shard(torch.randn(2, 2, 1, 4, 4), grid)
    elif case == "grad":
        x.grad = torch.zeros(2, 2, 3, 4, 4)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("block", r"rank 0 holds a block \(2, 2, 4, 4, 4\) but its box .* is \(2, 2, 3, 4, 4\)"),
        ("shape", "another shape"),
        ("axis", r"no axis \['deep'\] in Grid"),
        ("twice", "already cut"),
        ("thin", r"cannot cut dim 2 \(extent 1\)"),
        ("grad", "can only be set to None"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, case)


def uneven() -> None:
    """Any bounds, not only balanced ones."""
    grid = hs.Grid(width=3)
    partition = Partition((2, 2, 7), (None, None, Cut("width", (0, 1, 6, 7))))
    full = torch.randn(2, 2, 7, dtype=torch.float64)
    x = hs.Sharded.from_local(full[partition.box(grid.coords).slices()], partition, grid)
    weight = torch.randn(3, 2, 5, dtype=torch.float64)
    y = torch.nn.functional.conv1d(x, weight, padding=2)
    assert torch.allclose(y.full(), torch.nn.functional.conv1d(full, weight, padding=2))


def test_uneven_cuts() -> None:
    run_ranks(3, uneven)


def own_rule() -> Any:
    @hs.register(torch.heaviside)
    def heaviside(x: hs.Sharded, values: torch.Tensor) -> hs.Sharded:
        return x.like(torch.heaviside(x.local, values))

    full = torch.randn(2, 2, 6, 4, 4)
    try:
        y = torch.heaviside(hs.shard(full, hs.Grid(depth=2)), torch.tensor(1.0))
    finally:
        del hs.tensor.RULES[torch.heaviside]
    return torch.equal(y.full(), torch.heaviside(full, torch.tensor(1.0)))


def test_users_register_rules() -> None:
    assert run_ranks(2, own_rule) == [True, True]


def test_operators_in_c_take_a_tensor_itself_unless_python_sees_it() -> None:
    x = hs.shard(torch.randn(1, 2, 4, 4, 4), hs.Grid()).requires_grad_()
    y = x * 2
    with torch._C.DisableTorchFunctionSubclass():
        assert y.grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"
    seen: list[type] = []
    hooks = (lambda t: (seen.append(type(t)), t)[1], lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        (F.relu(x * x) * x).sum().backward()
    assert seen
    assert {*seen} == {torch.Tensor}
    watched: list[type] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            watched.extend(type(value) for value in args if isinstance(value, torch.Tensor))
            return function(*args, **(kwargs or {}))

    with Watch(), torch.no_grad():
        F.relu(x + x)
    assert {*watched} == {torch.Tensor}
    y = x * 2
    loss = (y * y * y).sum()
    y.mul_(0)  # another block takes the place of the one that was kept
    x.grad = None
    watched.clear()
    with Watch():
        loss.backward()
    assert {*watched} == {torch.Tensor}
    assert torch.allclose(x.grad.local, 6 * (x.local * 2).square())


def keeps_averages() -> tuple[list[float], list[float]]:
    """Gradients of a parameter that is given to a parallelised network, before and after a warning.

    The warning is that of another network, which is not parallelised.
    """
    grid = hs.Grid(depth=2)
    scale = torch.nn.Parameter(torch.ones(1, 1, 1, 1, 1))
    x = hs.shard(torch.arange(24.0).view(1, 1, 6, 2, 2), grid)
    found = []
    average_gradient(scale, grid)
    for _ in range(2):
        scale.grad = None
        (x * scale).mean().backward()
        assert scale.grad is not None
        found.append(scale.grad.flatten().tolist())
        other = torch.nn.Conv3d(1, 1, 1)
        other(x).mean().backward()
    return found[0], found[1]


def test_a_warning_ends_no_average() -> None:
    for before, after in run_ranks(2, keeps_averages):
        assert before == after == [pytest.approx(11.5)]


def test_tensors_beside_numbers_are_operands() -> None:
    x = hs.shard(torch.randn(2, 2, 4, 4, 4), hs.Grid())
    seen: list[object] = []
    rule = Rule(lambda: None, "test", "")
    with (
        mock.patch.object(hs.Sharded, "force", lambda self: seen.append(self)),
        mock.patch.object(x, "readers", (lambda: None,)),
    ):
        assert check_operands([(0, x)], rule, hs.Sharded) is x
        assert check_operands([(1, 2)], rule, hs.Sharded) is None
    assert len(seen) == 1
