"""The model of Oyama et al. 2020, section III-C, on traces made by hand (tier: no process)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hyperslab.planner.calls import BOTH_GRADIENTS
from hyperslab.planner.cost import step_cost
from hyperslab.planner.machine import LinearFit
from hyperslab.planner.records import Call, Exchange, LocalOperator, Pass, TensorSpec, Wait
from tests.planner.cost.made import exchange, gradients, operator, round_machine, statistics, trace

TIMES = {"main": 5.0, "halo": 2.0, "backward": 10.0, "update": 1.0}


@pytest.mark.parametrize(
    ("nbytes", "hidden", "seconds"),
    [
        (2, 1.0, 5 + 2),  # 2 SR = 4 hides behind Comp(main) = 5
        (4, 1.0, 8 + 2),  # max(5, 8) + Comp(halo)
        (2, 0.0, 5 + 4 + 2),  # nothing hides
        (2, 0.5, 5 + 2 + 2),  # half of the 4 s do
        (4, 0.5, 5 + 8 - 2.5 + 2),  # of 8 s, 5 could hide and half of these do
    ],
)
def test_forward_pass_of_a_layer(nbytes: int, hidden: float, seconds: float) -> None:
    begun = exchange(nbytes, peers=(1, 2))
    step = trace(begun, operator("main"), Wait(begun), operator("halo"))
    cost = step_cost(step, round_machine(hidden=hidden, times=TIMES), ranks=2)
    assert cost.seconds.total == pytest.approx(seconds)
    assert cost.seconds.forward == 7
    assert cost.seconds.halos == pytest.approx(seconds - 7)
    (layer,) = cost.layers
    assert (layer.layer, layer.phase, layer.operators) == ("conv", "forward", 2)
    assert layer.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("nbytes", "hidden", "total"), [(4, 1.0, 11), (30, 1.0, 31), (4, 0.25, 14), (4, 0.0, 15)]
)
def test_gradients_beside_the_backward_pass(nbytes: int, hidden: float, total: float) -> None:
    """The bucket is full before 10 s of backward work: max(sum BD + BF, sum AR)."""
    step = trace(
        operator("update", "forward"),
        gradients(nbytes),
        operator("backward", "backward"),
        operator("update", "optimizer"),
    )
    cost = step_cost(step, round_machine(hidden=hidden, times=TIMES), ranks=2)
    assert cost.seconds.total == pytest.approx(total + 1)
    assert cost.seconds.optimizer == 1
    assert cost.seconds.backward_data == 10


def test_a_bucket_that_is_full_last_hides_behind_nothing() -> None:
    step = trace(operator("backward", "backward"), gradients(4), operator("update", "optimizer"))
    cost = step_cost(step, round_machine(times=TIMES), ranks=2)
    assert cost.seconds.gradients == 4


@pytest.mark.parametrize(("per_node", "seconds"), [(8, 8), (1, 8 - 6 / 2)])
def test_rounded_gradients_are_half_as_many_bytes_between_machines(
    per_node: int, seconds: float
) -> None:
    bucket = dataclasses.replace(gradients(8), rounded=6)
    line = {"network": (LinearFit(latency=0, bandwidth=1),)}
    machine = round_machine(times=TIMES).model_copy(
        update={"ranks_per_node": per_node, "links": line, "sums": ()}
    )
    cost = step_cost(trace(bucket, operator("update", "optimizer")), machine, ranks=2)
    assert cost.seconds.gradients == seconds


def test_messages_queue_on_their_lane() -> None:
    first = exchange(3)
    second = exchange(3)
    step = trace(first, second, operator("main"), Wait(first), Wait(second))
    cost = step_cost(step, round_machine(times=TIMES), ranks=2)
    assert cost.seconds.halos == 1  # 6 s on the lane beside 5 s of work


def test_batch_norm_waits_for_its_sum() -> None:
    cost = step_cost(trace(operator("main"), statistics(3)), round_machine(times=TIMES), ranks=2)
    assert cost.seconds.statistics == 3
    assert {layer.layer: layer.waiting for layer in cost.layers} == {"conv": 0, "norm": 3}


def both_gradients(*wanted: bool) -> Call:
    x = TensorSpec((1, 1, 4, 4, 4), (64, 64, 16, 4, 1), torch.float32)
    weight = TensorSpec((1, 1, 3, 3, 3), (27, 27, 9, 3, 1), torch.float32)
    window = ((1, 1, 1), (1, 1, 1), (1, 1, 1), False, (0, 0, 0), 1)
    return Call(BOTH_GRADIENTS, (x, x, weight, None, *window, wanted))


def test_an_operator_of_two_passes_is_divided_as_the_two_alone_are() -> None:
    calls = {
        both_gradients(True, True, False): 8.0,
        both_gradients(True, False, False): 6.0,
        both_gradients(False, True, False): 4.0,
    }
    flops: tuple[tuple[Pass, int], ...] = (("backward-data", 300), ("backward-filter", 100))
    whole = LocalOperator(next(iter(calls)), "conv", "backward", flops, 16, 16)
    cost = step_cost(trace(whole), round_machine(calls=calls), ranks=2)
    assert cost.seconds.backward_data == pytest.approx(4.8)
    assert cost.seconds.backward_filter == pytest.approx(3.2)
    assert {layer.phase: layer.flops for layer in cost.layers} == dict(flops)


def test_every_second_has_a_cause_and_a_layer() -> None:
    begun = exchange(9, "backward")
    step = trace(
        operator("main"),
        statistics(2),
        begun,
        operator("backward", "backward", flops={"backward-data": 1, "backward-filter": 3}),
        Wait(begun),
        gradients(5),
        operator("update", "optimizer"),
    )
    cost = step_cost(step, round_machine(hidden=0.3, overhead=0.25, times=TIMES), ranks=2)
    seconds = cost.seconds
    assert seconds.total == pytest.approx(sum(dataclasses.astuple(seconds)))
    assert seconds.overhead == 3 * 0.25
    by_layer = sum(layer.seconds for layer in cost.layers)
    assert by_layer == pytest.approx(seconds.total - seconds.gradients - seconds.input)


def test_what_was_not_measured_is_said() -> None:
    step = trace(operator("main"), operator("unknown"))
    step.not_traced["aten.nonzero.default"] = 2
    cost = step_cost(step, round_machine(times=TIMES), ranks=2)
    assert cost.guessed == pytest.approx(1 / 6)
    assert cost.left_out == {"aten.nonzero.default": 2}
    assert cost.left_out_share == 0.5
    assert (cost.unknown, cost.known) == (pytest.approx(1 / 6), True)
    alien = step_cost(trace(operator("unknown")), round_machine(times=TIMES), ranks=2)
    assert (alien.unknown, alien.known) == (1, False)


def test_a_message_and_its_answer_travel_together() -> None:
    both = Exchange("conv", "forward", "", sends=((1, 4), (2, 1)), receives=((1, 6), (3, 2)))
    assert round_machine().exchange_seconds(both.by_peer, 0) == 6 + 1 + 2
