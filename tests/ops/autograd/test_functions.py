"""Users' own autograd functions equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from tests.ops.serial import Example, compare, distance, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks
from tests.selection import in_gate

COVERS = {"autograd": {"backward"}}


class Swish(Function):
    """Keeps its input, as memory-efficient activations do."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s * (1 + x * (1 - s)))


class Sigmoid(Function):
    """Keeps its output, of which torch gives back a block."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y)


class Scale(Function):
    """By a parameter, whose gradient is a sum over all that is cut."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x * weight.view(1, -1, 1, 1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight.view(1, -1, 1, 1, 1), (gradient * x).sum((0, 2, 3, 4))


class Clipped(Function):
    """Not linear in its gradient; its context is set up apart; two results, one a number."""

    @staticmethod
    def forward(x: Any, bound: float) -> Any:
        return x * 2, x.mean()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.bound = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any, of_mean: Any) -> Any:
        (x,) = ctx.saved_tensors
        flat = torch.ones_like(x) * of_mean / x.numel()
        return gradient.clamp(-ctx.bound, ctx.bound) * 2 + flat, None


class Recomputed(Function):
    """Checkpointing as networks write it themselves."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return F.conv3d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            y = F.conv3d(*inputs, padding=1)
        return torch.autograd.grad(y, inputs, gradient)


class Reversible(Function):
    """Keeps its output alone; its backward holds another backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.y = x.detach()
        ctx.weight = weight.detach()
        return F.conv3d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x = ctx.y.requires_grad_()
        weight = ctx.weight
        with torch.enable_grad():
            y = F.conv3d(x, weight, padding=1)
        torch.autograd.backward(y, gradient)
        return x.grad, None


def square(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(-1, 1, 1, 1, 1).expand(-1, weight.numel(), 3, 3, 3) / 9


def applied(x: Any, weight: torch.Tensor, *, way: str) -> Any:
    x = x * x
    if way == "swish":
        return Swish.apply(x) * weight.sum()
    if way == "sigmoid":
        return Sigmoid.apply(x).mean((2, 3), keepdim=True) * weight.sum()
    if way == "scale":
        return Scale.apply(x, weight)
    if way == "not cut":
        return Scale.apply(x.mean((2, 3, 4), keepdim=True), weight) * x
    if way == "clipped":
        y, mean = Clipped.apply(x, 0.3)
        return y * mean * weight.sum()
    if way == "checkpointed":
        return checkpoint(checkpointed, x, weight, use_reentrant=False)
    if way == "recomputed":
        return Recomputed.apply(x, square(weight))
    return Reversible.apply(x * weight.sum(), square(weight.detach()))


def checkpointed(x: Any, weight: torch.Tensor) -> Any:
    return Scale.apply(x, weight) * x.mean((1, 2, 3, 4), keepdim=True)


def with_gradients(x: Any, weight: torch.Tensor, *, way: str) -> Any:
    """Add gradients that torch.autograd.grad returns: it is a rule that runs a backward pass."""
    y = applied(x, weight, way=way)
    dx, dw = torch.autograd.grad(y.square().sum(), (x, weight), retain_graph=True)
    return y.sum() + (dx * x).sum() + (dw * weight).sum()


WAYS = [
    "swish",
    "sigmoid",
    "scale",
    "not cut",
    "clipped",
    "recomputed",
    "reversible",
    "checkpointed",
]


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    grid = draw(grids(ranks))
    channels = draw(st.integers(1, 3))
    batch = draw(st.integers(grid["data"], grid["data"] + 1))
    return Example(
        grid=grid,
        shape=(batch, channels, *(draw(st.integers(p, p + 3)) for p in parts_of(grid, 3))),
        weights=((channels,),),
        options={"way": draw(st.sampled_from(WAYS))},
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", in_gate([2, 3, 4, 6], kept=[2, 6]))
def test_equal_to_serial(ranks: int) -> None:
    run_ranks(ranks, compare, applied, draw_examples(examples(ranks), 28))


@pytest.mark.parametrize("ranks", in_gate([2, 3, 4, 6], kept=[2]))
def test_gradients_that_are_asked_for_equal_serial_ones(ranks: int) -> None:
    run_ranks(ranks, compare, with_gradients, draw_examples(examples(ranks), 28))


class Binary(Function):
    """Has a gradient of limited size, which is no linear function of the one that comes."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.clamp(-1, 1) / gradient.norm()


@functools.cache
def binary_operator() -> Any:
    """The same, as torch has it made of an operator of one's own; to make one imports much."""

    def sign(weight: torch.Tensor) -> torch.Tensor:
        return weight.sign()

    made = torch.library.custom_op("hyperslab_tests::binary", sign, mutates_args=())
    made.register_autograd(Binary.backward)
    return made


class BinaryConvolution(nn.Module):
    def __init__(self, binary: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.binary = binary
        self.weight = nn.Parameter(torch.randn(2, 1, 3, 3, 3))
        self.scale = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        binary = self.binary(self.weight * self.scale.exp().view(-1, 1, 1, 1, 1))
        return F.conv3d(x, binary * 2, padding=1)


def of_parameters(axes: dict[str, int] | None) -> list[torch.Tensor | None]:
    found = []
    for binary in (Binary.apply, binary_operator()):
        found += of_parameters_by(binary, axes)
    return found


def of_parameters_by(binary: Any, axes: dict[str, int] | None) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    net: nn.Module = BinaryConvolution(binary).double()
    x = torch.randn(2, 1, 7, 6, 4, dtype=torch.float64)
    if axes is not None:
        grid = hs.Grid(**axes)
        net, x = hs.parallelize(net, grid), hs.shard(x, grid)
    net(x).exp().mean().backward()
    return [p.grad for p in net.parameters()]


def test_a_function_of_parameters_alone_sees_their_serial_gradient() -> None:
    expected = of_parameters(None)
    for found in run_ranks(2, of_parameters, {"depth": 2}):
        assert max(map(distance, found, expected)) <= 1e-10
