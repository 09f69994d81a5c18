"""Times from a machine file (tier: no process)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperslab.kernels.memory_format import strides_in
from hyperslab.planner.calls import measurable_passes, only_pass
from hyperslab.planner.machine import Machine, entry_of, load_machine, save_machine
from hyperslab.planner.records import Call, LocalOperator, Pass, TensorSpec


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, strides_in(shape), torch.float32)


def convolution(width: int, channels: int = 8) -> LocalOperator:
    x = spec(1, channels, width, width, width)
    weight = spec(channels, channels, 3, 3, 3)
    arguments = (x, weight, None, (1, 1, 1), (1, 1, 1), (1, 1, 1), False, (0, 0, 0), 1)
    flops = 2 * 27 * channels**2 * width**3
    call = Call("aten.convolution.default", arguments)
    read = x.nbytes + weight.nbytes
    return LocalOperator(call, "conv", "forward", (("forward", flops),), read, x.nbytes)


def gradients(width: int, *, of_input: bool = True, channels: int = 8) -> LocalOperator:
    forward = convolution(width, channels)
    x, weight, *rest = forward.call.arguments
    arguments = (x, x, weight, (0,), *rest[1:], (of_input, True, False))
    names: tuple[Pass, ...] = ("backward-data", "backward-filter")
    flops = tuple((name, forward.total_flops) for name in names[not of_input :])
    call = Call("aten.convolution_backward.default", arguments)
    assert isinstance(x, TensorSpec)
    return LocalOperator(call, "conv", "backward", flops, 2 * x.nbytes, x.nbytes)


def machine(**changes: Any) -> Machine:
    values: dict[str, Any] = {
        "name": "test",
        "date": "2026-11-22",
        "versions": {},
        "processor": "none",
        "ranks_per_node": 4,
        "ranks_per_socket": 2,
        "memory": 2**34,
        "settings": [
            {"ranks": 1, "threads": 4, "flops": {"float32": 4e11}, "bandwidth": 4e10},
            {"ranks": 4, "flops": {"float32": 1e11, "bfloat16": 2e11}, "bandwidth": 1e10},
        ],
        "links": {
            "device": [
                {"up_to": 1000, "latency": 1e-6, "bandwidth": 1e9},
                {"latency": 1e-5, "bandwidth": 1e10},
            ],
            "network": [{"latency": 1e-4, "bandwidth": 1e8}],
        },
    }
    return Machine.model_validate(values | changes)


def with_operators(*timed: tuple[LocalOperator, float]) -> Machine:
    setting = machine().settings[0].model_dump()
    setting["operators"] = [entry_of(operator, seconds).model_dump() for operator, seconds in timed]
    return machine(settings=[setting])


def test_ranks_at_once_choose_the_setting() -> None:
    found = [machine().setting(ranks).ranks for ranks in (1, 2, 3, 4, 8)]
    assert found == [1, 4, 4, 4, 4]


def test_a_measured_call_takes_what_was_measured() -> None:
    estimate = with_operators((convolution(16), 0.25)).setting(1).estimate(convolution(16))
    assert (estimate.seconds, estimate.how) == (0.25, "measured")


def test_between_shapes_the_slowness_is_interpolated() -> None:
    # Twice the roofline at both ends: twice the roofline between them, too.
    bare = machine().setting(1)
    timed = [(convolution(w), 2 * bare.roofline_of(convolution(w))) for w in (8, 32)]
    estimate = with_operators(*timed).setting(1).estimate(convolution(16))
    assert estimate.how == "interpolated"
    assert math.isclose(estimate.seconds, 2 * bare.roofline_of(convolution(16)), rel_tol=1e-4)


def test_the_nearer_shape_counts_more() -> None:
    bare = machine().setting(1)
    slow = convolution(8)
    fast = convolution(64)
    timed = [(slow, 10 * bare.roofline_of(slow)), (fast, bare.roofline_of(fast))]
    setting = with_operators(*timed).setting(1)
    slowness = [
        setting.estimate(c).seconds / bare.roofline_of(c) for c in map(convolution, (9, 60))
    ]
    assert 5 < slowness[0] < 10
    assert 1 < slowness[1] < 2


def test_channels_count_more_than_the_size_of_the_volume() -> None:
    """A convolution of few channels is slow, whatever its volume."""
    bare = machine().setting(1)
    thin, thick = convolution(32, channels=4), convolution(8, channels=32)
    timed = [(thin, 8 * bare.roofline_of(thin)), (thick, bare.roofline_of(thick))]
    setting = with_operators(*timed).setting(1)
    for asked, low, high in ((convolution(16, channels=4), 4, 8), (convolution(8, 24), 1, 2)):
        assert low < setting.estimate(asked).seconds / bare.roofline_of(asked) < high


@pytest.mark.parametrize("width", [8, 16, 64, 128])
def test_a_call_without_a_neighbour_is_not_interpolated(width: int) -> None:
    """Twice the width of a volume is near, four times is not."""
    timed = (convolution(32), 1.0)
    setting = with_operators(timed).setting(1)
    near = width in (16, 64)
    assert setting.estimate(convolution(width)).how == ("interpolated" if near else "modelled")
    if not near:
        assert setting.estimate(convolution(width)).seconds == setting.roofline_of(
            convolution(width)
        )


def test_without_measurement_the_roofline_counts() -> None:
    setting = machine().setting(4)
    small = convolution(16)
    estimate = setting.estimate(small)
    assert (estimate.seconds, estimate.how) == (small.total_flops / 1e11, "modelled")
    thin = LocalOperator(Call("aten.relu.default", (spec(10**6),)), "", "forward", (), 4, 6)
    assert setting.estimate(thin).seconds == 10 / 1e10


def test_dtypes_have_peaks_of_their_own() -> None:
    call = Call("aten.mm.default", (TensorSpec((2, 2), (2, 1), torch.bfloat16),))
    operator = LocalOperator(call, "", "forward", (("forward", 10**6),), 0, 0)
    assert machine().setting(4).estimate(operator).seconds == 1e6 / 2e11


def test_passes_of_a_backward_apart() -> None:
    both, data, weights = measurable_passes(gradients(16))
    assert both == gradients(16)
    assert data.call.arguments[-1] == (True, False, False)
    assert weights.call.arguments[-1] == (False, True, False)
    assert data.total_flops == weights.total_flops == both.total_flops // 2
    setting = with_operators((both, 3.0), (data, 1.0), (weights, 2.0)).setting(1)
    assert setting.estimate(both).seconds == 3.0
    assert setting.estimate(only_pass(both, "backward-data")).seconds == 1.0
    assert setting.estimate(only_pass(both, "backward-filter")).seconds == 2.0


def test_a_pass_that_is_not_done() -> None:
    first = gradients(16, of_input=False)
    assert measurable_passes(first) == [first]
    with pytest.raises(ValueError, match="does no backward-data"):
        only_pass(first, "backward-data")


def test_other_gradients_are_another_kind() -> None:
    setting = with_operators((gradients(16, of_input=False), 3.0)).setting(1)
    assert setting.estimate(gradients(32, of_input=False)).how == "interpolated"
    assert setting.estimate(gradients(32)).how == "modelled"


def test_classes_of_links() -> None:
    found = [machine().link(0, peer) for peer in (1, 2, 3, 4)]
    assert found == ["device", "node", "node", "network"]


def test_messages_by_their_size() -> None:
    assert machine().message_seconds(1000, "device") == 1e-6 + 1e-6
    assert machine().message_seconds(2000, "device") == 1e-5 + 2e-7


def test_the_nearest_slower_link_stands_in() -> None:
    assert "node" not in machine().links
    assert machine().message_seconds(100, "node") == machine().message_seconds(100, "network")
    alone = machine(links={})
    assert alone.message_seconds(100, "node") == alone.sum_seconds(100, range(4)) == 0.0


def test_a_sum_over_one_rank_is_free() -> None:
    assert machine().sum_seconds(10**6, range(1)) == 0.0


def test_sums_grow_with_ranks_and_bytes() -> None:
    seconds = [machine().sum_seconds(10**6, range(ranks)) for ranks in (2, 4, 8, 64, 2048)]
    assert seconds == sorted(seconds)
    assert machine().sum_seconds(10**7, range(8)) > seconds[2]
    moved = 2 * 10**6 / 2 / 1e10
    assert math.isclose(seconds[0], 2 * 1e-5 + moved)


def test_the_ranks_of_a_node_share_its_way_out() -> None:
    free = machine().sum_seconds(10**8, range(64))
    shared = machine(node_bandwidth=1e8).sum_seconds(10**8, range(64))
    assert math.isclose(shared - machine().sum_seconds(10**8, range(4)), 2 * 10**8 * 15 / 16 / 1e8)
    assert shared > free


def test_sums_over_one_rank_of_each_node_share_its_way_out() -> None:
    narrow = machine(node_bandwidth=1e8)
    per_node = narrow.ranks_per_node
    strided = range(0, 16 * per_node, per_node)
    everybody = narrow.sum_seconds(10**8, range(16 * per_node))
    assert math.isclose(narrow.sum_seconds(10**8, strided), per_node * 2 * 10**8 * 15 / 16 / 1e8)
    assert narrow.sum_seconds(10**8, strided) > everybody
    assert narrow.sum_seconds(10**8, range(8)) == narrow.sum_seconds(10**8, range(8))
    # On the edge of two nodes, two ranks on each: the way out takes longer than of four on one.
    assert narrow.sum_seconds(10**8, range(2, 6)) > narrow.sum_seconds(10**8, range(4))


def test_messages_share_the_way_out_with_those_that_send_as_far() -> None:
    narrow = machine(node_bandwidth=1e8)
    per_node = narrow.ranks_per_node
    edge = per_node - 1
    assert narrow.exchange_seconds({1: 10**8}, 0) == machine().exchange_seconds({1: 10**8}, 0)
    assert math.isclose(narrow.exchange_seconds({edge + 1: 10**8}, edge), 1e-4 + 1)
    for far in (per_node, 40 * per_node):
        assert math.isclose(narrow.exchange_seconds({0: 10**8}, far), 1e-4 + per_node)
    alone = machine().message_seconds(10**8, "network")
    assert machine().exchange_seconds({per_node: 10**8}, 0) == alone


def test_latencies_of_an_exchange_overlap_and_bytes_do_not() -> None:
    far = machine().ranks_per_node
    near = machine().message_seconds(1000, "device") - machine().message_seconds(0, "device")
    seconds = machine().message_seconds(1000, "network") + near
    assert math.isclose(machine().exchange_seconds({1: 1000, far: 1000}, 0), seconds)
    assert machine().exchange_seconds({}, 0) == 0


def test_measured_sums_are_a_power_of_bytes() -> None:
    sums = [{"ranks": 2, "pieces": [{"scale": 1e-6, "exponent": 0.5}]}]
    measured = machine(sums=sums)
    assert math.isclose(measured.sum_seconds(10**4, range(2)), 1e-4)
    # Three quarters of the bytes instead of half of them.
    assert math.isclose(measured.sum_seconds(10**4, range(4)), 1.5e-4)


def test_measured_sums_over_nodes_go_before_what_follows_from_links() -> None:
    node = {"ranks": 4, "pieces": [{"scale": 1e-6, "exponent": 0.5}]}
    nodes = {"ranks": 8, "pieces": [{"latency": 0.01, "bandwidth": 1e8}]}
    measured = machine(sums=[node, nodes])
    assert math.isclose(measured.sum_seconds(10**6, range(8)), 0.02)
    assert math.isclose(measured.sum_seconds(10**4, range(4)), 1e-4)
    assert math.isclose(measured.sum_seconds(10**6, range(16)), 0.02 * (15 / 16) / (7 / 8))
    # One rank of each node was not measured.
    strided = range(0, 8, 4)
    assert measured.sum_seconds(10**6, strided) == machine().sum_seconds(10**6, strided)


def test_reads_share_the_file_system() -> None:
    reading = {"bandwidth": 1e9, "total": 2e9, "latency": 0.001}
    reads = machine(reading=reading)
    assert reads.read_seconds(10**9, 1) == 1.001
    assert reads.read_seconds(10**9, 8) == 4.001
    assert machine().read_seconds(10**9, 8) == 0.0


def test_the_file_of_a_machine(tmp_path: Path) -> None:
    whole = with_operators((convolution(16), 0.25), (gradients(8), 0.5))
    save_machine(whole, tmp_path / "machine.yaml")
    assert load_machine(tmp_path / "machine.yaml") == whole
    lines = (tmp_path / "machine.yaml").read_text().splitlines()
    assert sum("aten.convolution" in line for line in lines) == 2  # one a line
