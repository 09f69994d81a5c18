"""No operator falls through: each is equal to torch's or refused (tier: no process, then a few
gloo ranks).
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import get_overridable_functions, get_testing_overrides

import hyperslab as hs
from hyperslab.tensor.registry import RULES, op_name
from tests.ranks import run_ranks

TESTS = Path(__file__).parent.parent
WHERE = {
    "attribute": "tensor/test_strict.py",
    "autograd": "nn/test_parallelize.py",
    "convolution": "nn/test_conv.py",
    "dense": "nn/test_reduce.py",
    "loss": "nn/test_reduce.py",
    "normalisation": "nn/test_norm.py",
    "pointwise": "nn/test_pointwise.py",
    "pooling": "nn/test_pool.py",
    "random": "nn/test_dropout.py",
    "reduction": "nn/test_reduce.py",
    "shape": "nn/test_reduce.py",
}
"""The test of each family of rules; a family that is not here has none."""

TESTED = {
    "autograd": {"backward"},
    "convolution": {"conv1d", "conv2d", "conv3d"},
    "dense": {"linear"},
    "loss": {"mse_loss", "l1_loss", "smooth_l1_loss"},
    "normalisation": {"batch_norm"},
    "pooling": {f"{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)},
    "random": {
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_dropout",
    },
    "reduction": {"sum", "mean"},
    "shape": {
        "reshape",
        "view",
        "reshape_as",
        "view_as",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
    },
}
"""What those tests call; pointwise rules and attributes are tested by walking over the table."""


def functions() -> Iterator[Callable[..., Any]]:
    """Every function of torch that a tensor class can override."""
    for space in get_overridable_functions().values():
        yield from space


def cut(*shape: int) -> Any:
    return hs.shard(torch.randn(*shape or (2, 3, 4, 4, 4)), hs.Grid())


def test_every_rule_has_a_test() -> None:
    for function, rule in RULES.items():
        assert rule.family in WHERE, f"{op_name(function)}: family {rule.family} has no test"
        if rule.family not in ("pointwise", "attribute"):
            name = op_name(function).split(".")[-1]
            assert name in TESTED[rule.family], f"{op_name(function)} has no test"
    for family, path in WHERE.items():
        text = (TESTS / path).read_text()
        assert all(name.rstrip("_123d") in text for name in TESTED.get(family, ())), family


def test_what_has_no_rule_is_refused_by_the_dispatcher() -> None:
    x, refused = cut(), 0
    for function in functions():
        if function in RULES:
            continue
        with pytest.raises(hs.UnsupportedOp, match="has no rule for a cut tensor"):
            hs.Sharded.__torch_function__(function, (hs.Sharded,), (x,), {})
        refused += 1
    assert refused > 850


def arguments(function: Callable[..., Any], x: Any) -> list[Any] | None:
    """The cut tensor wherever torch's own list of signatures has an argument without default.

    None for functions that the class itself overrides: the next test calls those.
    """
    dummy = get_testing_overrides().get(function)
    if dummy is None or getattr(function, "__name__", "") in vars(hs.Sharded):
        return None
    args: list[Any] = []
    for parameter in inspect.signature(dummy).parameters.values():
        if parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
            continue
        args.append([x, x] if parameter.name in ("tensors", "sequence") else x)
    return args


def test_real_calls_do_not_fall_through() -> None:
    """Call each function for real: with a cut tensor it must raise, whoever raises first."""
    x, reached, fell = cut(), 0, []
    warnings.simplefilter("ignore")
    for function in functions():
        args = arguments(function, x)
        if function in RULES or args is None:
            continue
        try:
            result = function(*args)
        except hs.UnsupportedOp:
            reached += 1
        except Exception:  # torch's own parser refused the arguments
            continue
        else:
            # Python makes a TypeError of NotImplemented.
            if result is not NotImplemented and op_name(function) not in HARMLESS:
                fell.append((op_name(function), type(result)))
    assert fell == []
    assert reached > 500


def test_methods_of_a_cut_tensor_do_not_fall_through() -> None:
    """Through the instance, where the class itself could have put something else in the way."""
    x = cut()
    own = {name for name in vars(hs.Sharded) if not name.startswith("__")} | {"grad"}
    for name in dir(torch.Tensor):
        if name.startswith("__") or name in own or name in ("_make_subclass", "as_subclass"):
            continue
        try:
            member = getattr(x, name)
        except (hs.UnsupportedOp, RuntimeError, AttributeError):
            continue
        if callable(member) and not isinstance(member, type):
            function = getattr(torch.Tensor, name)
            if function in RULES:
                continue
            if not isinstance(function, (types.MethodDescriptorType, types.FunctionType)):
                continue
            try:
                result = member()
            except Exception:
                continue
            assert name in HARMLESS, f"x.{name}() gave {type(result)}"
        else:
            descriptor = getattr(torch.Tensor, name)
            known = name in HARMLESS or getattr(descriptor, "__get__", None) in RULES
            assert known, f"x.{name} is {member!r}"


HARMLESS = {
    "torch.Tensor._grad_fn.__get__",
    "_fix_weakref",
    "_grad_fn",
    "_has_symbolic_sizes_strides",
    "_python_dispatch",
    "_use_count",
}
"""What says nothing about the values or the shape."""


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


WAYS_AROUND: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "ufunc": lambda x: np.add(x, 1),
    "dlpack": lambda x: np.from_dlpack(x),
    "torch dlpack": lambda x: torch.from_dlpack(x),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x.item(),
    "float": lambda x: float(x),
    "index": lambda x: x[0],
    "set item": lambda x: x.__setitem__(0, 1.0),
    "iterate": lambda x: list(x),
    "bool": lambda x: bool(x),
    "contains": lambda x: 1.0 in x,
    "deepcopy": lambda x: copy.deepcopy(x),
    "copy": lambda x: copy.copy(x),
    "pickle": lambda x: pickle.dumps(x),
    "save": lambda x: torch.save(x, io.BytesIO()),
    "data": lambda x: x.data,
    "set data": lambda x: setattr(x, "data", torch.zeros(1)),
    "storage": lambda x: x.untyped_storage(),
    "data_ptr": lambda x: x.data_ptr(),
    "stride": lambda x: x.stride(),
    "aten": lambda x: torch.ops.aten.sum.default(x),
    "aten packet": lambda x: torch.ops.aten.add(x, x),
    "foreach": lambda x: torch._foreach_add([x], [x]),
    "foreach in place": lambda x: torch._foreach_add_([x], 1.0),
    "collate": lambda x: torch.utils.data.default_collate([x, x]),
    "cat": lambda x: torch.cat([torch.zeros(1), x]),
    "total norm": lambda x: torch.nn.utils.get_total_norm([x]),
    "where": lambda x: torch.where(x > 0),
    "list of": lambda x: torch.tensor([x, x]),
    "transpose": lambda x: x.mT,
    "new": lambda x: x.new_zeros(3),
    "backward": lambda x: x.backward(),
    "autograd.backward": lambda x: torch.autograd.backward(x, x),
    "autograd.grad": lambda x: torch.autograd.grad(x, x),
    "unsorted": lambda x: torch.sort(x),
    "max": lambda x: x.max(),
    "softmax": lambda x: F.softmax(x, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "fft": lambda x: torch.fft.fftn(x),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "module": lambda x: torch.nn.LayerNorm(4)(x),
    "matmul": lambda x: x @ x,
    "matmul from the right": lambda x: torch.zeros(4, 4) @ x,
    "set": lambda x: x.set_(torch.zeros(1)),
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, x),
}


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


@pytest.mark.parametrize(
    "way",
    [
        lambda x: torch.tensor(x),
        lambda x: torch.Tensor(x),
        lambda x: torch.utils.dlpack.to_dlpack(x),
        lambda x: torch.vmap(lambda row: row * 2)(x),
    ],
    ids=["tensor", "Tensor", "to_dlpack", "vmap"],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.xfail(strict=True, reason="torch calls no __torch_function__ here")
def test_ways_around_that_torch_leaves_open(way: Callable[[Any], Any]) -> None:
    """They copy the block, as x.local does; a torch that closes one makes this test fail."""
    with pytest.raises(hs.UnsupportedOp):
        way(cut())
