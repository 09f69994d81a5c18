"""The published machine: each number has a source, and none is what a prediction is compared with
(tier: no process)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F

from hyperslab import models
from hyperslab.planner.machine import load_machine
from hyperslab.planner.trace import LocalOperator, Trace, Workload, trace_step

PEAK = {8: (13.0e12, 23.6e12), 32: (53.4e12, 109.1e12)}
"""Oyama et al. 2020, table II, of conv1 and of all convolutions: [flop/s] by GPUs of a sample."""

ABOUT = ("format", "settings.0.ranks", "settings.0.threads")
"""Numbers of the file that say nothing of the machine."""

NOT_KNOWN = ("latency", "launch", "overhead.operator", "overhead.step")
"""What nobody published: 0."""


def numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """All in a machine file, by their keys."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from numbers(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from numbers(part, f"{key}.{index}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, value


def test_every_number_has_a_source() -> None:
    lassen = load_machine("lassen-v100")
    sources = [source.key for source in lassen.sources]
    seen = 0
    for key, number in numbers(lassen.model_dump(mode="json", exclude={"sources"})):
        if key in ABOUT or key.endswith((".channels", ".voxels")):
            continue
        if key.endswith(NOT_KNOWN):
            assert number == 0, key
            continue
        assert any(key == source or key.startswith(f"{source}.") for source in sources), key
        seen += 1
    assert seen > 15


def test_nothing_was_measured_on_it() -> None:
    lassen = load_machine("lassen-v100")
    assert not any(setting.operators for setting in lassen.settings)
    assert not lassen.sums
    assert lassen.hidden.halos == lassen.hidden.gradients == 1  # the assumption of the paper


def convolutions(trace: Trace) -> list[LocalOperator]:
    return [one for one in trace.operators if one.call.name.startswith("aten.convolution")]


def test_speeds_of_convolutions_are_the_column_of_peaks() -> None:
    build = partial(models.CosmoFlow, 512)
    work = Workload(build, (1, 4, 512, 512, 512), (1, 4), loss=F.mse_loss)
    whole = convolutions(trace_step(work, {}, device="cuda"))
    total = sum(one.total_flops for one in whole)
    first = sum(one.total_flops for one in whole if one.layer.endswith("conv1"))
    rates = {
        (rate.channels, rate.voxels): rate.rate
        for rate in load_machine("lassen-v100").settings[0].rates
    }
    extents = {4: 512, 16: 256, 32: 128, 64: 64}
    assert len(rates) == len(PEAK) * len(extents)
    for (ways, (conv1, everything)), (channels, extent) in itertools.product(
        PEAK.items(), extents.items()
    ):
        others = (total - first) / (total / everything - first / conv1)
        expected = (conv1 if channels == 4 else others) / ways
        found = rates[channels, extent**3 // ways]
        assert found == pytest.approx(expected, rel=2e-3), (ways, channels)
        assert math.isfinite(found)
