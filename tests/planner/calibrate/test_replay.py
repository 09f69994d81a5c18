"""Recorded calls, run again (tier: no process)."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

import hyperslab as hs
from hyperslab.planner.records import Call, TensorSpec
from hyperslab.planner.timing import (
    MOST_SETS,
    WRITES_BEFORE_REFILL,
    Clock,
    Replay,
    make_tensor,
    operator_of,
)

CPU = torch.device("cpu")
FORMS = [
    ((2, 3), (3, 1)),
    ((2, 3), (1, 2)),
    ((4, 5), (1, 0)),
    ((1, 2, 3, 4, 5), (120, 1, 40, 10, 2)),
    ((0, 3), (3, 1)),
    ((), ()),
]


@pytest.mark.parametrize(("shape", "strides"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_have_their_form(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = make_tensor(TensorSpec(shape, strides, dtype), CPU)
    assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (shape, strides, dtype)


def test_a_call_runs_with_its_options() -> None:
    spec = TensorSpec((3, 4), (4, 1), torch.float32)
    replay = Replay(Call("aten.sum.dim_IntList", (spec, (1,)), (("dtype", torch.float64),)), CPU)
    replay()
    (result,) = replay._kept
    assert isinstance(result, torch.Tensor)
    assert (result.shape, result.dtype) == ((3,), torch.float64)


def test_operands_rotate() -> None:
    spec = TensorSpec((100,), (1,), torch.float32)
    replay = Replay(Call("aten.neg.default", (spec,)), CPU)
    for _ in range(2 * MOST_SETS):
        replay.refresh()
        replay()
    results = [result for result in replay._kept if isinstance(result, torch.Tensor)]
    assert len({result.data_ptr() for result in results}) == MOST_SETS
    operands = [args[0].data_ptr() for args, _ in replay._sets]
    assert len(set(operands)) == MOST_SETS


def test_large_operands_are_there_once() -> None:
    spec = TensorSpec((200 << 20,), (1,), torch.uint8)
    assert len(Replay(Call("aten.clone.default", (spec,)), CPU)._sets) == 1


def test_results_count_as_operands_do() -> None:
    """Made of a few numbers, 64 of them would fill the memory."""
    replay = Replay(Call("aten.zeros.default", ((100 << 20,),), (("dtype", torch.uint8),)), CPU)
    assert len(replay._sets) == replay._kept.maxlen == 2


def test_a_slice_counts_as_all_that_it_is_cut_from() -> None:
    spec = TensorSpec((2, 4), (100 << 20, 1), torch.uint8)
    assert len(Replay(Call("aten.neg.default", (spec,)), CPU)._sets) == 2


def test_values_that_are_written_to_do_not_fade() -> None:
    spec = TensorSpec((10,), (1,), torch.float32)
    replay = Replay(Call("aten.mul_.Scalar", (spec, 1e-3)), CPU)
    for _ in range(MOST_SETS * WRITES_BEFORE_REFILL * 5):
        replay.refresh()
        replay()
    assert all(args[0].min() > 1e-30 for args, _ in replay._sets)


@pytest.mark.parametrize("library", [False, True])
def test_gradients_run_in_the_library_that_rules_ask_for(library: bool) -> None:
    x = TensorSpec((1, 4, 4, 4, 4), (256, 64, 16, 4, 1), torch.float32)
    weight = TensorSpec((4, 4, 3, 3, 3), (108, 27, 9, 3, 1), torch.float32)
    ones = (1, 1, 1)
    arguments = (x, x, weight, (0,), ones, ones, ones, False, (0, 0, 0), 1, (True, True, False))
    replay = Replay(Call("aten.convolution_backward.default", arguments), CPU, library=library)
    replay()
    assert all(args[1].is_mkldnn == library for args, _ in replay._sets)


@pytest.mark.parametrize("name", ["aten.nothing.default", "aten.sum", "none.sum.default"])
def test_operators_that_are_not_there(name: str) -> None:
    with pytest.raises(LookupError, match=name):
        operator_of(name)


def test_the_turns_of_others_on_a_core_count() -> None:
    """A median of single repetitions would see none of them."""
    seconds = itertools.cycle([0.001, 0.001, 0.001, 0.009])
    moments = itertools.accumulate(step for each in seconds for step in (0.0, each))
    with mock.patch.object(Clock, "_now", side_effect=moments):
        assert Clock(hs.Grid()).seconds(lambda: None) == pytest.approx(0.003)


@pytest.mark.parametrize(("budget", "calls"), [(0.001, 1 + 1), (0.05, 1 + 5)])
def test_a_long_call_is_repeated_less_often(budget: float, calls: int) -> None:
    """One to warm up, and one or the fewest repetitions of 0.05 s."""
    done: list[None] = []
    moments = itertools.accumulate(itertools.cycle([0.0, 0.05]))
    with mock.patch.object(Clock, "_now", side_effect=moments):
        Clock(hs.Grid(), budget=budget).seconds(lambda: done.append(None))
    assert len(done) == calls
