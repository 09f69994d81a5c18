"""The chores before a rule runs (tier: no process): NumPy's names, out=, dims, one grid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.tensor import RULES
from hyperslab.tensor.dispatch import Signature, read_dim, read_dims

CALLS: list[tuple[Any, ...]] = []


def rule(
    input: hs.Sharded, dim: int | tuple[int, ...] | None = -1, keepdim: bool = False
) -> tuple[Any, ...]:
    CALLS.append((dim, keepdim))
    return CALLS[-1]


def call(*args: Any, **kwargs: Any) -> Any:
    """As torch calls the dispatcher; its own parser would ask for other arguments."""
    return hs.Sharded.__torch_function__(torch.heaviside, (hs.Sharded,), args, kwargs)


@pytest.fixture
def heaviside() -> Iterator[Any]:
    """An operator with a rule of a user."""
    hs.register(torch.heaviside, dims=["dim"])(rule)
    yield call
    del RULES[torch.heaviside]


def cut() -> hs.Sharded:
    return hs.shard(torch.randn(2, 3, 4, 4, 4), hs.Grid())


def test_dims_count_from_the_front(heaviside: Any) -> None:
    x = cut()
    assert heaviside(x, 1) == (1, False)
    assert heaviside(x, -2) == (3, False)
    assert heaviside(x) == (4, False), "a default too"
    assert heaviside(x, dim=[-1, 0]) == ((4, 0), False)
    assert heaviside(x, None) == (None, False)
    assert heaviside(input=x, dim=-5) == (0, False)
    assert heaviside(x, True) == (True, False), "an argument of another overload"


@pytest.mark.parametrize("integer", [np.int64, torch.tensor])
def test_dims_are_any_integers(heaviside: Any, integer: Any) -> None:
    x = cut()
    assert heaviside(x, integer(-1)) == (4, False)
    assert heaviside(x, [integer(-1), 0]) == ((4, 0), False)
    assert x.narrow(integer(-1), 1, 2).shape == (2, 3, 4, 4, 2)
    assert x.select(integer(-4), 0).shape == (2, 4, 4, 4)
    assert x.max(np.int64(-4)).values.shape == (2, 4, 4, 4)
    assert torch.max(x, torch.tensor(1)).shape == x.shape, "of two tensors"


def test_dims_that_do_not_exist(heaviside: Any) -> None:
    with pytest.raises(IndexError, match="heaviside: dim 5 is out of range for a tensor of 5 dims"):
        heaviside(cut(), 5)
    with pytest.raises(IndexError, match="dim -6"):
        heaviside(cut(), (0, -6))


def test_numpy_names(heaviside: Any) -> None:
    assert heaviside(cut(), axis=-1, keepdims=True) == (4, True)
    assert heaviside(x=cut(), axis=0) == (0, False)
    assert torch.sum(cut(), axis=(2, 3, 4), keepdims=True).shape == (2, 3, 1, 1, 1)


def test_out_is_refused_once(heaviside: Any) -> None:
    with pytest.raises(hs.LayoutError, match=r"heaviside\(out=...\) has no rule; use its return"):
        heaviside(cut(), 1, out=torch.empty(0))
    assert heaviside(cut(), 1, out=None) == (1, False)


def test_a_rule_may_take_out() -> None:
    def own(x: hs.Sharded, *, out: torch.Tensor | None = None) -> torch.Tensor | None:
        return out

    hs.register(torch.heaviside)(own)
    here = torch.empty(1)
    try:
        assert call(cut(), out=here) is here
    finally:
        del RULES[torch.heaviside]


def test_operands_on_two_grids() -> None:
    x = cut()
    other = hs.shard(torch.randn(2, 3, 4, 4, 4), hs.Grid())
    assert (x + other).shape == x.shape, "equal grids are one"
    vars(other)["_grid"] = type("Two", (), {"extents": {"data": 2}, "__str__": lambda _: "two"})()
    for meet in (lambda: x + other, lambda: torch.cat([x, other]), lambda: x.add(other=other)):
        with pytest.raises(hs.LayoutError, match=r"operands on two grids: .* and two"):
            meet()


def test_rules_of_other_names_are_left_alone() -> None:
    signature = Signature.of(lambda x1, x2, axis=0: None, [])
    assert dict(signature.numpy_names) == {}
    assert signature.read((1,), {"axis": 3}, torch.add) == ((1,), {"axis": 3})


@pytest.mark.parametrize(
    "own", [lambda x: x, lambda x, *dim: x, lambda x, dim, /: x, lambda x, **dim: x]
)
def test_dims_go_by_name(own: Any) -> None:
    with pytest.raises(
        ValueError, match="dims='dim' is not an argument of the rule that goes by name"
    ):
        hs.register(torch.heaviside, dims=["dim"])(own)
    assert torch.heaviside not in RULES


def test_read() -> None:
    assert read_dims([0, -1], 3, "flip") == (0, 2)
    with pytest.raises(IndexError, match="flip: dim 0 is out of range for a tensor of 0 dims"):
        read_dim(0, 0, "flip")
