"""Every rule's gradient can be differentiated again, or says that it cannot (tier: gloo ranks).

All that a rule computes in its own backward pass is an `autograd.Function`; the rest is torch's.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.util.torch_internals import BlockFunction
from tests.ops.serial import Example, compare
from tests.ranks import run_ranks

TESTS = Path(__file__).parents[1]

ELSEWHERE = {
    "SlabStage": "slabs/test_stages.py",
    "SlabConv": "slabs/test_stages.py",
    "_ShardParameter": "filter_parallel/test_share.py",
    "_TakenBefore": "test_plans.py",
    "_Weighted": "autograd/test_double_backward.py",
}
"""Functions whose second derivatives another test compares."""

ONCE = {"_Sample", "_Scatter", "_Attend"}
"""Functions that are differentiable once."""

HELPERS = {"_Refused", "BlockFunction"}


def functions() -> dict[str, type[torch.autograd.Function]]:
    """All of the package."""
    for package in ("comm", "kernels", "tensor", "ops"):
        folder = importlib.import_module(f"hyperslab.{package}")
        for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            if ".cuda" not in module.name and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found = [*torch.autograd.Function.__subclasses__(), *BlockFunction.__subclasses__()]
    return {one.__name__: one for one in found if one.__module__.startswith("hyperslab.")}


AFFINE = ((4,), (4,))
KERNEL = ((4, 4, 3, 3, 3),)

Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def conv(x: Any, w: torch.Tensor) -> Any:
    return F.conv3d(x, w, padding=1)


CASES: dict[str, Case] = {
    # Without a large eps the bias has a gradient of rounding alone.
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0, 0.1), AFFINE),
    "batch norm, no weight": (lambda x: F.batch_norm(x, None, None, None, None, True), ()),
    "instance norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), AFFINE),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), AFFINE),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (8, 6, 4), w, b), ((8, 6, 4),) * 2),
    "rms norm": (lambda x, w: F.rms_norm(x, (8, 6, 4), w), ((8, 6, 4),)),
    "softmax": (lambda x: F.softmax(x, 2), ()),
    "log softmax": (lambda x: F.log_softmax(x, 2), ()),
    "variance": (lambda x: torch.var(x, (2, 3, 4)) + torch.std(x, (0, 2, 3, 4)), ()),
    "amax": (lambda x: torch.amax(x, (2, 3)), ()),
    "norm, activation, maxima": (
        lambda x, w, b: F.max_pool3d(F.relu(F.batch_norm(x, None, None, w, b, True)), 2),
        AFFINE,
    ),
    "norm, activation, means": (
        lambda x, w, b: F.avg_pool3d(F.leaky_relu(F.group_norm(x, 2, w, b), 0.1), 2),
        AFFINE,
    ),
    "chain behind a convolution": (
        lambda x, k, w, b: F.relu(F.instance_norm(conv(x, k), weight=w, bias=b)),
        KERNEL + AFFINE,
    ),
    "activation, maxima": (lambda x, k: F.max_pool3d(F.leaky_relu(conv(x, k), 0.2), 2), KERNEL),
    "convolutions": (lambda x, k: conv(conv(x, k).tanh(), k), KERNEL),
    "windows": (lambda x: F.max_pool3d(x, 3, 1, 1), ()),
    "averages": (lambda x: F.avg_pool3d(x, 3, 2, 1), ()),
    "adaptive": (lambda x: F.adaptive_avg_pool3d(x, 3), ()),
    "joined": (lambda x, k: conv(torch.cat([conv(x, k), conv(x, k).tanh()], 1)[:, 1:5], k), KERNEL),
    "rows again": (lambda x, k: conv(x, k).view(2, 2, 2, 8, 6, 4).sin(), KERNEL),
    "transposed": (lambda x, k: F.conv_transpose3d(x, k, stride=2), KERNEL),
    "slopes": (lambda x, w: F.prelu(x, w), ((4,),)),
    "cut again": (lambda x: (hs.shard(x.full(), x.grid) if is_cut(x) else x).sin(), ()),
    "whole": (lambda x, k: conv(hs.gather(x, ["depth"]) if is_cut(x) else x, k).sin(), KERNEL),
}


def is_cut(x: Any) -> bool:
    return isinstance(x, hs.Sharded)


@contextmanager
def watched(seen: set[str]) -> Iterator[None]:
    """Adds the names of functions whose backward pass has a graph."""
    with ExitStack() as stack:
        for name, one in functions().items():
            stack.enter_context(patch.object(one, "backward", recording(name, one.backward, seen)))
        yield


def recording(name: str, backward: Callable[..., Any], seen: set[str]) -> staticmethod[..., Any]:
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            seen.add(name)
        return backward(ctx, *gradients)

    return staticmethod(run)


def compared(dtype: torch.dtype) -> set[str]:
    """Compares all cases with the serial ones; returns what took part."""
    seen: set[str] = set()
    with watched(seen):
        for name, (operator, weights) in CASES.items():

            def op(x: Any, *given: Any, operator: Any = operator) -> Any:
                y = operator(x, *given)
                (gradient,) = torch.autograd.grad((y**3).mean(), x, create_graph=True)
                return gradient

            op.__name__ = name
            grids = [{"depth": 2}, {"data": 2}]
            shape = (2, 4, 8, 6, 4)
            compare(op, [Example(grid, shape, weights, dtype=dtype) for grid in grids])
    return seen


def test_every_rule() -> None:
    seen = run_ranks(2, compared, torch.float64)[0] | run_ranks(2, compared, torch.float32)[0]
    assert seen | set(ELSEWHERE) | ONCE == set(functions()) - HELPERS
    assert not seen & ONCE


@pytest.mark.parametrize("file", sorted(set(ELSEWHERE.values())))
def test_elsewhere_is_a_test_of_it(file: str) -> None:
    assert "create_graph=True" in (TESTS / file).read_text()


def sampled(x: Any) -> Any:
    grid = hs.shard(torch.rand(2, 8, 6, 4, 3) - 0.5, x.grid)
    return F.grid_sample(x, grid, align_corners=False)


def attended(x: Any) -> Any:
    tokens = x.transpose(2, 3)
    return F.scaled_dot_product_attention(tokens, tokens, tokens)


def refusals() -> list[str]:
    """What is said where something that is differentiable once is differentiated again."""
    grid = hs.Grid(depth=2)
    words = []
    x = hs.shard(torch.randn(2, 4, 8, 6, 4), grid).requires_grad_()
    held = torch.randn(2, 4, 8, 6, 4, requires_grad=True)
    tokens = hs.shard(torch.randn(2, 4, 8, 6, 4), grid).requires_grad_()
    cases = ((sampled(x), x), (attended(tokens), tokens), (hs.scatter(held, grid), held))
    for y, leaf in cases:
        (y**3).sum().backward(create_graph=True)
        if leaf.grad is None:  # another rank holds it
            continue
        try:
            leaf.grad.square().sum().backward()
        except hs.UnsupportedOp as error:
            words.append(str(error).partition("\n")[0])
    return words


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_what_is_differentiable_once_says_so() -> None:
    said = run_ranks(2, refusals)[0]
    assert said == [
        "the gradient of grid_sample cannot be differentiated again",
        "the gradient of attention over cut tokens cannot be differentiated again",
        "the gradient of scatter cannot be differentiated again",
    ]


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: F.relu(x).sqrt(),
        lambda x: F.max_pool2d(F.relu(x), 2).sqrt(),
        lambda x: F.lp_pool2d(x, 2.0, 2),
    ],
)
def test_where_an_activation_passes_nothing_on(operator: Callable[[Any], Any]) -> None:
    """An infinite gradient is none where the activation passes none on."""
    x = torch.tensor([[0.0, -1.0, 2.0, 3.0], [0.0, 0.0, 4.0, -5.0]]).view(1, 1, 2, 4)
    found = []
    for cut in (False, True):
        leaf = x.clone().requires_grad_()
        y = operator((hs.shard(leaf, hs.Grid()) if cut else leaf) * 2)
        (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first * torch.ones_like(first)).sum(), leaf)
        found.append((first, second))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, equal_nan=True)
