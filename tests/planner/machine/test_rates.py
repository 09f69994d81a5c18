"""Published speeds of convolutions (tier: no process)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hyperslab.planner.machine import load_machine
from hyperslab.planner.machine.operator_times import PublishedRate, published_rate
from hyperslab.planner.trace.records import TensorSpec
from tests.planner.machine.test_machine import convolution, gradients, machine

RATES = [
    PublishedRate(channels=4, voxels=1000, rate=1e9),
    PublishedRate(channels=8, voxels=512, rate=1e10),
    PublishedRate(channels=8, voxels=32768, rate=1e12),
]


@pytest.mark.parametrize(
    ("width", "rate"), [(4, 1e10), (8, 1e10), (16, 1e11), (32, 1e12), (64, 1e12)]
)
def test_between_blocks_it_is_interpolated(width: int, rate: float) -> None:
    for operator in (convolution(width), gradients(width)):
        found = published_rate(operator.call, RATES)
        assert found is not None
        assert math.isclose(found, rate)


def test_the_nearest_channels_count() -> None:
    assert published_rate(convolution(64, channels=2).call, RATES) == pytest.approx(1e9)
    assert published_rate(convolution(64, channels=300).call, RATES) == pytest.approx(1e12)


def test_all_samples_of_a_rank_count() -> None:
    one = convolution(8).call
    x, *others = one.arguments
    assert isinstance(x, TensorSpec)
    batch = replace(x, shape=(64, *x.shape[1:]))
    assert published_rate(one, RATES) == pytest.approx(1e10)
    assert published_rate(replace(one, arguments=(batch, *others)), RATES) == pytest.approx(1e12)


def test_other_operators_have_none() -> None:
    relu = convolution(8).call.__class__("aten.relu.default", ())
    assert published_rate(relu, RATES) is None
    assert published_rate(convolution(8).call, []) is None


def test_a_rate_is_no_measurement() -> None:
    setting = machine().settings[0].model_copy(update={"rates": tuple(RATES)})
    operator = convolution(8)
    estimate = setting.estimate(operator)
    assert estimate.how == "modelled"
    assert math.isclose(estimate.seconds, operator.total_flops / 1e10)


def test_the_first_layer_of_the_paper_takes_what_the_paper_says() -> None:
    # Oyama et al. 2020, Table II: 13.0 Tflop/s on 8 GPUs for 4 channels of 512³.
    rates = load_machine("lassen-v100").setting(8).rates
    assert published_rate(convolution(256, channels=4).call, rates) == pytest.approx(13.0e12 / 8)
