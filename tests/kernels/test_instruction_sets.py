"""The compiled kernels give one result, whatever the processor (tier: no process; may compile).

Machines with and without AVX-512 may be ranks of one run, or one go on where the other was.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings

from hyperslab.kernels import registry
from hyperslab.kernels.compile import CannotCompile, Library, library, load_library
from tests.kernels.compiled import WITHOUT_WIDE_REGISTERS, compiled
from tests.kernels.conv import test_depthwise as channelwise
from tests.kernels.conv import test_winograd as filters
from tests.kernels.epilogue import cases as chains
from tests.kernels.max_pool import test_equality as pools
from tests.kernels.resample import test_equality as maps

ops = torch.ops.hyperslab


@pytest.fixture(scope="module")
def builds() -> list[Library]:
    """As this processor has it, and as one without AVX-512."""
    own = library()
    try:
        narrow = load_library(compiled(WITHOUT_WIDE_REGISTERS))
    except CannotCompile:
        pytest.skip("no compiler")
    assert own is not None
    return [own, narrow]


def bits(x: torch.Tensor) -> torch.Tensor:
    """As integers; of what is not a number, only that."""
    plain = torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x
    return plain.reshape(-1).clone().view(torch.uint8)


def assert_same(
    builds: list[Library], run: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]
) -> None:
    found = []
    for functions in builds:
        with patch.object(registry, "library", lambda functions=functions: functions):
            result = run()
        found.append([result] if isinstance(result, torch.Tensor) else result)
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert torch.equal(bits(one), bits(other))


@settings(max_examples=40, deadline=None)
@given(case=chains.cases())
def test_chains_and_their_sums(builds: list[Library], case: chains.Case) -> None:
    x, norm = case.filled(case.shape, case.dtype), case.numbers(3)
    chain = (case.slope, case.pool, case.maximum)
    y, marks = ops.chain_forward(x, norm, *chain, True, case.result)
    assert_same(builds, lambda: ops.chain_forward(x, norm, *chain, True, case.result))
    g, wanted = case.filled(y.shape, case.result), None if norm is None else x
    for through in (case.numbers(2), None):
        backward = (g, marks, wanted, norm, through, *chain, case.shape, case.dtype)
        assert_same(builds, lambda backward=backward: ops.chain_backward(*backward))
    finite = case.ordered(x.nan_to_num(0, 2, -2))
    assert_same(builds, lambda: ops.channel_sums(finite, 0))
    assert_same(builds, lambda: ops.reorder(x, case.channels_last, case.result))
    if norm is not None:
        g = case.ordered(g.nan_to_num(0, 2, -2))
        assert_same(builds, lambda: ops.chain_backward_sums(g, marks, finite, norm, *chain))


def test_sums_of_many_values(builds: list[Library]) -> None:
    """Several steps, with and without sums that wide registers hold."""
    for channels in (8, 48):
        x = torch.randn(2, channels, 9, 30, 31).contiguous(memory_format=torch.channels_last_3d)
        assert_same(builds, lambda x=x: ops.channel_sums(x, 0))


@settings(max_examples=30, deadline=None)
@given(case=pools.cases())
def test_windows(builds: list[Library], case: pools.Case) -> None:
    x = case.filled(case.shape, special=True)
    forward = (x, *case.windows, case.extents, True, case.result)
    assert_same(builds, lambda: ops.window_maximum(*forward))


@settings(max_examples=30, deadline=None)
@given(case=maps.cases())
def test_resampling(builds: list[Library], case: maps.Case) -> None:
    x = case.block(case.shape, special=True)
    entries = maps.tensors(case.maps())
    assert_same(builds, lambda: ops.resample(x, entries, case.results, case.result))


@settings(max_examples=30, deadline=None)
@given(case=filters.cases())
def test_gradients_of_filters(builds: list[Library], case: filters.Case) -> None:
    if not all(functions.winograd_gradient for functions in builds):
        pytest.skip("no AVX2")
    x, g = case.volumes()
    assert_same(builds, lambda: ops.winograd_gradient(x, g, case.padding, True))


@settings(max_examples=20, deadline=None)
@given(case=channelwise.cases())
def test_gradients_of_depthwise_filters(builds: list[Library], case: channelwise.Case) -> None:
    if not all(functions.depthwise_gradient for functions in builds):
        pytest.skip("no AVX2")
    x, g = case.volume(case.problem.x, 0), case.volume(case.problem.y, 1)
    operands = (x, g, case.kernel, case.padding, case.dilation)
    assert_same(builds, lambda: ops.depthwise_gradient(*operands))


def test_gradients_of_many_filters(builds: list[Library]) -> None:
    """More channels than one vector has, and more tiles than are summed at once."""
    if not all(functions.winograd_gradient for functions in builds):
        pytest.skip("no AVX2")
    case = filters.Case(1, 24, 40, (6, 40, 70), (1, 1, 1), torch.float32, 5)
    x, g = case.volumes()
    assert_same(builds, lambda: ops.winograd_gradient(x, g, case.padding, True))
