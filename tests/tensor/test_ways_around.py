"""Ways around the op table, and what a cut tensor says about itself (tier: no process, then a
few gloo ranks).
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.tensor.dispatch import RULES, op_name
from hyperslab.util.torch_internals import keep_known
from tests.ranks import run_ranks
from tests.tensor.test_strict import cut


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


WAYS_AROUND: dict[str, Callable[[Any], Any]] = {
    "ufunc": lambda x: np.add(x, 1),
    "dlpack": lambda x: np.from_dlpack(x),
    "torch dlpack": lambda x: torch.from_dlpack(x),
    "item": lambda x: x.item(),
    "float": lambda x: float(x),
    "bool": lambda x: bool(x),
    "contains": lambda x: 1.0 in x,
    "deepcopy": lambda x: copy.deepcopy(x),
    "set data": lambda x: setattr(x, "data", torch.zeros(1)),
    "storage": lambda x: x.untyped_storage(),
    "data_ptr": lambda x: x.data_ptr(),
    "stride": lambda x: x.stride(),
    "aten": lambda x: torch.ops.aten.sum.default(x),
    "aten packet": lambda x: torch.ops.aten.add(x, x),
    "foreach": lambda x: torch._foreach_add([x], [x]),
    "foreach in place": lambda x: torch._foreach_add_([x], 1.0),
    "foreach norm": lambda x: torch._foreach_norm([x]),
    "list of": lambda x: torch.tensor([x, x]),
    "backward": lambda x: x.backward(),
    "autograd.backward": lambda x: torch.autograd.backward(x),
    "histogram": lambda x: torch.histogram(x, 4),
    "fractional pooling": lambda x: F.fractional_max_pool3d(x, 2, output_ratio=0.5),
    "eig": lambda x: torch.linalg.eig(x),
    "norm": lambda x: torch.linalg.matrix_norm(x),
    "module": lambda x: torch.nn.CosineEmbeddingLoss()(x, x, x),
    "set": lambda x: x.set_(torch.zeros(1)),
    "subclass": lambda x: x.as_subclass(torch.Tensor),
}


OF_WHOLE: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "tolist": lambda x: x.tolist(),
    "copy": lambda x: copy.copy(x),
    "pickle": lambda x: pickle.dumps(x),
    "save": lambda x: torch.save(x, io.BytesIO()),
}
"""Of a tensor that is not cut they give all of it, see tests/tensor/test_item.py."""


def of_a_part(way: str) -> None:
    OF_WHOLE[way](hs.shard(torch.randn(2, 3, 4, 4, 4), hs.Grid(depth=2)))


@pytest.mark.parametrize("way", OF_WHOLE)
def test_parts_are_not_given_away(way: str) -> None:
    with pytest.raises(hs.UnsupportedOp) as caught:
        run_ranks(2, of_a_part, way)
    message = str(caught.value)
    assert "2 x 3 x 4 x 4 x 4" in message
    assert "x.full()" in message


@pytest.mark.parametrize("way", WAYS_AROUND)
def test_ways_around_are_closed(way: str) -> None:
    with pytest.raises(hs.UnsupportedOp) as caught:
        WAYS_AROUND[way](cut())
    message = str(caught.value)
    assert "2 x 3 x 4 x 4 x 4" in message or "Sharded" in message
    assert "x.full()" in message


def autograd_functions() -> None:
    """A function of the user's sees the cut tensor itself, and its operators follow the rules."""
    full = torch.randn(2, 2, 6, 4, 4, dtype=torch.float64, requires_grad=True)
    y = Twice.apply(hs.shard(full, hs.Grid(depth=2)))
    assert isinstance(y, hs.Sharded)
    assert torch.equal(y.full(), 2 * full)
    y.full().sum().backward()
    assert torch.equal(full.grad, torch.full_like(full, 2.0))


def test_a_users_autograd_function() -> None:
    run_ranks(2, autograd_functions)


def attributes() -> None:
    """What a cut tensor says about itself is what the whole one would say."""
    full = torch.randn(2, 2, 6, 4, 4, dtype=torch.float32)
    x = hs.shard(full, hs.Grid(depth=2))
    names = [op_name(f) for f, rule in RULES.items() if rule.family == "attribute"]
    properties = {n.split(".")[-2] for n in names if n.endswith(".__get__")}
    for name in properties - {"grad_fn", "_version", "_backward_hooks", "output_nr"}:
        assert getattr(x, name) == getattr(full, name), name
    methods = {n.split(".")[-1] for n in names if not n.endswith(("__get__", "__set__"))}
    changing = {n for n in methods if n.startswith(("register_", "requires_", "retain_"))}
    for name in methods - changing - {"is_tensor", "is_inference"}:
        assert getattr(x, name)() == getattr(full, name)(), name
    assert not x.is_inference()
    assert torch.is_tensor(x)
    assert torch.is_floating_point(x)
    assert x.requires_grad_() is x
    assert (x * 1).grad_fn is not None
    seen: list[torch.Tensor] = []
    y = x * 3
    y.retain_grad()
    y.register_hook(seen.append)
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf))
    (y.full() ** 2).sum().backward()
    assert len(seen) == 2
    assert torch.allclose(x.grad.full(), 18 * full)
    assert torch.allclose(y.grad.full(), 6 * full)


def test_attributes() -> None:
    run_ranks(2, attributes)


def conversions() -> list[bool]:
    """Functions that ask no ``__torch_function__``; an attached one hands gradients on."""
    full = torch.randn(2, 1, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    x = hs.shard(full, hs.Grid(depth=2))
    ways: list[Callable[[Any], Any]] = [
        lambda y: torch.as_tensor(y),
        lambda y: torch.as_tensor(y, dtype=torch.float32, device=y.device),
        lambda y: torch.as_tensor(y, dtype=torch.complex128, device=None),
        lambda y: torch.asarray(y, dtype=torch.float32),
        lambda y: torch.asarray(y, copy=True, requires_grad=False),
        lambda y: torch.as_tensor(data=y),
        lambda y: torch.tensor(y),
        lambda y: torch.tensor(data=y, dtype=torch.float32, device=y.device, requires_grad=True),
        lambda y: torch.tensor(y, pin_memory=False).add_(1),
        lambda y: torch.autograd.Variable(y),
        lambda y: torch.autograd.Variable(y, requires_grad=True),
    ]
    found = [(way(x), way(full * 1)) for way in ways]
    alike = [torch.equal(a.full(), b) and a.requires_grad == b.requires_grad for a, b in found]
    assert torch.equal(x.full(), full), "torch.tensor copies"
    assert torch.as_tensor([1.0]).tolist() == torch.asarray([1.0]).tolist() == [1.0]
    assert torch.autograd.Variable(torch.ones(1), requires_grad=True).requires_grad
    found[1][0].full().sum().backward()  # of `as_tensor`, which is attached in every torch
    return [*alike, torch.equal(full.grad, torch.ones_like(full))]


def test_conversions_take_all_of_a_tensor() -> None:
    assert run_ranks(2, conversions) == [[True] * 12] * 2


@pytest.mark.xfail(strict=True, reason="torch calls no __torch_function__ here")
def test_a_way_around_that_torch_leaves_open() -> None:
    """It copies the block, as x.local does; a torch that closes it makes this test fail."""
    with pytest.raises(hs.UnsupportedOp):
        torch.Tensor(cut())


def counted() -> torch.Tensor:
    return torch.arange(3)


@pytest.mark.filterwarnings("ignore")  # torch deprecates scripting
def test_torch_knows_a_function_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It heeds the default device, and can be scripted, whoever has asked before."""
    device: Any = importlib.import_module("torch.utils._device")
    unasked = functools.lru_cache(1)(device._device_constructors.__wrapped__)
    monkeypatch.setattr(device, "_device_constructors", unasked)
    original = torch.arange

    def replacement(*args: Any, **options: Any) -> torch.Tensor:
        return original(*args, **options)

    keep_known(replacement, original)
    monkeypatch.setattr(torch, "arange", replacement)
    with torch.device("meta"):
        assert counted().device.type == "meta"
    assert torch.jit.script(counted)().tolist() == [0, 1, 2]


def squares(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def deviations(x: torch.Tensor, factor: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Call another scripted function, as it does when it is one."""
    y = factor * (x - x.mean(2, keepdim=True))
    return y, scripted(x=y)


with warnings.catch_warnings(action="ignore"):  # torch deprecates it, networks still have it
    scripted = torch.jit.script(squares)
    scripted_deviations = torch.jit.script(deviations)
    traced = torch.jit.trace(squares, torch.ones(2))
    activation = torch.jit.script(torch.nn.ReLU())


def scripted_functions() -> list[bool]:
    """Call one by position and by name, and see its gradient."""
    full = torch.randn(2, 1, 5, 2, 2, dtype=torch.float64, requires_grad=True)
    x = hs.shard(full, hs.Grid(depth=2))
    y, total = scripted_deviations(x, factor=3.0)
    expected, whole = scripted_deviations(full, factor=3.0)
    gradient = torch.autograd.grad(total, full)[0]
    alike = [torch.allclose(y.full(), expected), torch.allclose(total, whole)]
    return [*alike, torch.allclose(gradient, torch.autograd.grad(whole, full)[0])]


def test_scripted_functions_take_all_of_a_tensor() -> None:
    """The Python runs that they were made of: torch.jit would compute with the block alone."""
    assert run_ranks(2, scripted_functions) == [[True] * 3] * 2


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda x: torch.utils.dlpack.to_dlpack(x), r"torch\.to_dlpack cannot(?s:.*)x\.local"),
        (lambda x: traced(x), r"torch\.jit \(script, trace\) cannot(?s:.*)PYTORCH_JIT=0"),
        (lambda x: traced(x=x), r"torch\.jit \(script, trace\) cannot"),
        (lambda x: activation(x), r"torch\.jit \(script, trace\) cannot"),
        (lambda x: torch.jit.trace(squares, x), r"torch\.jit\.trace cannot(?s:.*)x\.full"),
        (
            lambda x: torch.jit.trace_module(torch.nn.ReLU(), {"forward": (x,)}),
            r"torch\.jit\.trace_module cannot(?s:.*)not parallelised",
        ),
        (
            lambda x: torch.vmap(squares)(x),
            r"torch\.vmap .*(?s:.*)take dim 0 for.*(?s:.*)torch.stack\(\[f",
        ),
        (lambda x: torch.func.vjp(squares, x), r"torch\.func .*(?s:.*)use torch.autograd.grad"),
        (lambda x: torch.func.grad_and_value(squares)(x), "cannot look at a cut tensor"),
        (lambda x: torch.func.jacrev(squares)(x), "cannot look at a cut tensor"),
        (lambda x: torch.func.functionalize(squares)(x), "cannot look at a cut tensor"),
        (
            lambda x: torch.func.grad(lambda w: squares(x * w))(torch.ones(4)),
            r"Tensor.mul: torch\.func and torch.vmap cannot transform a function that uses cut",
        ),
    ],
    ids=[
        "to_dlpack",
        "traced",
        "by name",
        "module",
        "trace",
        "trace_module",
        "vmap",
        "vjp",
        "grad",
        "jacrev",
        "functionalize",
        "beside",
    ],
)
def test_transforms_of_functions_are_refused(transform: Callable[[Any], Any], message: str) -> None:
    with pytest.raises((hs.UnsupportedOp, hs.LayoutError), match=message):
        transform(cut())
    assert torch.vmap(squares)(torch.ones(2, 3)).tolist() == [3, 3]
    assert scripted(torch.ones(3)) == 3
