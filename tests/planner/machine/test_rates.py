"""Published speeds of convolutions (tier: no process)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hyperslab.planner.machine import PublishedRate, load_machine, published_rate
from hyperslab.planner.records import Call, TensorSpec
from tests.planner.machine.test_machine import convolution, gradients, machine

RATES = [
    PublishedRate(channels=4, thickness=1, rate=1e9),
    PublishedRate(channels=8, thickness=1 / 16, rate=1e10),
    PublishedRate(channels=8, thickness=1, rate=1e12),
]


def slab(planes: int, width: int = 64, channels: int = 8) -> Call:
    """A convolution's call on a block with so many planes."""
    call = convolution(width, channels=channels).call
    x, *others = call.arguments
    assert isinstance(x, TensorSpec)
    return replace(call, arguments=(replace(x, shape=(1, channels, planes, width, width)), *others))


@pytest.mark.parametrize(("planes", "rate"), [(1, 1e10), (4, 1e10), (16, 1e11), (64, 1e12)])
def test_between_forms_it_is_interpolated(planes: int, rate: float) -> None:
    found = published_rate(slab(planes), RATES)
    assert found is not None
    assert math.isclose(found, rate)
    gradient = gradients(64)
    assert published_rate(gradient.call, RATES) == pytest.approx(1e12)  # of a cube


def test_the_nearest_channels_count() -> None:
    assert published_rate(convolution(64, channels=2).call, RATES) == pytest.approx(1e9)
    assert published_rate(convolution(64, channels=300).call, RATES) == pytest.approx(1e12)


def test_other_operators_have_none() -> None:
    relu = convolution(8).call.__class__("aten.relu.default", ())
    assert published_rate(relu, RATES) is None
    assert published_rate(convolution(8).call, []) is None


def test_a_rate_is_no_measurement() -> None:
    setting = machine().settings[0].model_copy(update={"rates": tuple(RATES[:1])})
    operator = convolution(8)
    estimate = setting.estimate(operator)
    assert estimate.how == "modelled"
    assert math.isclose(estimate.seconds, operator.total_flops / 1e9)


def test_the_first_layer_of_the_paper_takes_what_the_paper_says() -> None:
    # Oyama et al. 2020, Table II: 93.8 % of 73.9 ms for 928 Gflop on 8 GPUs.
    rates = load_machine("lassen-v100").setting(8).rates
    found = published_rate(slab(64, width=512, channels=4), rates)
    assert found == pytest.approx(928e9 / 8 / (0.938 * 73.9e-3), rel=1e-3)
