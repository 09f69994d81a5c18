"""Gradients made where they are averaged, and who must not see it (tier: one process)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyperslab.geometry import Cut
from hyperslab.ops.filter_parallel import shard_parameter
from hyperslab.tensor.gradient_buffers import GradientBuffers

ROWS = Cut("depth", (0, 2, 5))
Number = torch.dtype


class Homes:
    """A parameter whose gradient has a home, in the midst of other numbers."""

    def __init__(self, dtype: Number = torch.float32) -> None:
        self.parameter = nn.Parameter(torch.randn(5, 3, dtype=dtype))
        self.memory = torch.full((40,), float("nan"), dtype=dtype)
        self.home = self.memory[10:25].view(5, 3)
        self.homes = GradientBuffers()
        self.homes.add(self.parameter, self.home)
        self.homes.begin(averaged=True)

    def take(self, dtype: Number = torch.bfloat16, rows: Cut | None = ROWS) -> torch.Tensor:
        return shard_parameter(self.parameter, dtype, self.homes, rows, 1)

    def at_home(self) -> bool:
        assert self.parameter.grad is not None
        return self.parameter.grad.data_ptr() == self.home.data_ptr()


def only(rows: slice, values: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(5, 3)
    whole[rows] = values
    return whole


FACTOR = torch.arange(9.0).view(3, 3)


def backward(case: Homes, dtype: Number = torch.bfloat16) -> None:
    (case.take(dtype) * FACTOR.to(dtype)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_is_made_in_its_home(dtype: Number) -> None:
    case = Homes()
    backward(case, dtype)
    assert case.at_home()
    assert torch.equal(case.home, only(slice(2, 5), FACTOR))
    assert case.homes.copy_in(case.parameter) == ROWS
    assert case.memory[:10].isnan().all()
    assert case.memory[25:].isnan().all()


@pytest.mark.parametrize("rows", [None, ROWS])
def test_filters_that_are_cast_to_channels_last(rows: Cut | None) -> None:
    filters = nn.Parameter(torch.randn(5, 3, 2, 1, 3))
    homes = GradientBuffers()
    home = torch.full_like(filters, float("nan"))
    homes.add(filters, home)
    homes.begin(averaged=True)
    cast = shard_parameter(filters, torch.bfloat16, homes, rows, 1, last=True)
    assert cast.is_contiguous(memory_format=torch.channels_last_3d)
    lo, hi = (0, 5) if rows is None else rows.interval(1)
    assert torch.equal(cast, filters[lo:hi].bfloat16())
    factor = torch.arange(90.0).view(5, 3, 2, 1, 3)
    (cast * factor[lo:hi].bfloat16()).sum().backward()
    assert filters.grad is not None
    assert filters.grad.data_ptr() == home.data_ptr()
    assert torch.equal(home[lo:hi], factor[lo:hi])
    assert not home[:lo].any()
    frozen = filters.detach()
    assert torch.equal(shard_parameter(frozen, torch.bfloat16, homes, rows, 1, last=True), cast)


def test_all_rows_in_another_type() -> None:
    case = Homes()
    case.take(rows=None).sum().backward()
    assert case.at_home()
    assert torch.equal(case.home, torch.ones(5, 3))
    assert case.homes.copy_in(case.parameter) is None
    assert case.take(torch.float32, rows=None) is case.parameter


def test_a_parameter_that_is_used_twice() -> None:
    """Also beside a use that nobody knows of."""
    for other in (lambda c: c.take(), lambda c: c.parameter):
        case = Homes()
        ((case.take() * FACTOR.bfloat16()).sum() + other(case).float().sum()).backward()
        assert case.homes.copy_in(case.parameter) is None
        plain = torch.zeros(5, 3) if other(case).shape[0] == 3 else torch.ones(5, 3)
        plain[2:5] += FACTOR if other(case).shape[0] == 5 else FACTOR + 1
        assert case.at_home()
        torch.testing.assert_close(case.home, plain)


def test_a_gradient_that_accumulates() -> None:
    case = Homes()
    case.homes.begin(averaged=False)
    backward(case)
    assert not case.at_home()
    assert case.memory.isnan().all()
    case.homes.begin(averaged=True)
    backward(case)
    assert case.memory.isnan().all()
    assert case.homes.copy_in(case.parameter) is None
    torch.testing.assert_close(case.home, only(slice(2, 5), 2 * FACTOR))
    assert case.at_home()


def test_zeros_that_are_kept() -> None:
    case = Homes()
    backward(case)
    case.homes.copy_in(case.parameter)
    assert case.parameter.grad is not None
    case.parameter.grad.zero_()
    case.homes.begin(averaged=True)
    backward(case)
    assert case.homes.copy_in(case.parameter) is None
    torch.testing.assert_close(case.home, only(slice(2, 5), FACTOR))


def test_gradients_on_request_are_nobodys_home() -> None:
    case = Homes()
    (found,) = torch.autograd.grad((case.take() * FACTOR.bfloat16()).sum(), case.parameter)
    assert case.memory.isnan().all()
    torch.testing.assert_close(found, only(slice(2, 5), FACTOR))
    (first,) = torch.autograd.grad(
        (case.take(torch.float32) ** 2).sum(), case.parameter, create_graph=True
    )
    (second,) = torch.autograd.grad((first**2).sum(), case.parameter)
    torch.testing.assert_close(second, only(slice(2, 5), 8 * case.parameter.detach()[2:5]))
    (case.take() * FACTOR.bfloat16()).sum().backward(inputs=[case.parameter])
    assert case.at_home()


def doubles_in_place(g: torch.Tensor) -> None:
    g.mul_(2)


def doubles(g: torch.Tensor) -> torch.Tensor:
    return g * 2


@pytest.mark.parametrize("hook", [doubles_in_place, doubles])
def test_hooks_that_change_it(hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    case = Homes()
    case.parameter.register_hook(hook)
    backward(case)
    assert case.homes.copy_in(case.parameter) is None
    torch.testing.assert_close(case.home, only(slice(2, 5), 2 * FACTOR))
    assert case.at_home()


def test_a_hook_that_keeps_it() -> None:
    case = Homes()
    kept: list[torch.Tensor] = []
    case.parameter.register_hook(kept.append)
    backward(case)
    case.homes.copy_in(case.parameter)
    torch.testing.assert_close(case.home, only(slice(2, 5), FACTOR))
    assert case.at_home()


@pytest.mark.parametrize("made", [True, False])
def test_a_gradient_that_somebody_kept_stays_what_it_was(made: bool) -> None:
    case = Homes()
    backward(case)
    case.homes.copy_in(case.parameter)
    kept = case.parameter.grad
    assert kept is not None
    before = copy.deepcopy(kept)
    case.parameter.grad = None
    case.homes.begin(averaged=True)
    if made:
        (case.take() * 3).sum().backward()
    else:
        (case.parameter * 3).sum().backward()
    case.homes.copy_in(case.parameter)
    assert torch.equal(kept, before)
    assert kept is not case.parameter.grad
    assert case.at_home()
    assert not torch.equal(case.home, before)


def test_another_parameter_has_no_home_here() -> None:
    case = Homes()
    other = nn.Parameter(torch.randn(5, 3))
    shard_parameter(other, torch.bfloat16, case.homes, ROWS, 0).sum().backward()
    assert case.memory.isnan().all()
    torch.testing.assert_close(other.grad, only(slice(0, 2), torch.ones(2, 3)))


def test_a_parameter_frozen_before_the_backward_pass() -> None:
    case = Homes()
    total = case.take().sum()
    case.parameter.requires_grad_(False)
    total.backward()
    assert case.parameter.grad is None or case.parameter.grad.shape == (5, 3)
