"""The published machine: each number has a source, and none is what a prediction is compared with
(tier: no process)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F

from hyperslab import models
from hyperslab.planner.machine import load_machine
from hyperslab.planner.records import LocalOperator, Trace
from hyperslab.planner.trace import Workload, trace_step

PEAK = {8: (13.0e12, 23.6e12), 32: (53.4e12, 109.1e12)}
"""Oyama et al. 2020, table II, of conv1 and of all convolutions: [flop/s] by GPUs of a sample."""

LOCAL = {8: (0.938 * 73.9e-3, 0.956 * 142.9e-3), 32: (0.647 * 23.5e-3, 0.824 * 48.8e-3)}
"""The same table, Time x Rel [s]: what the local kernels of conv1 and of all take."""

FITTED = {"node_sums", "exchange", "hidden.gradients", "reserved"}
"""What is no published number, but follows from some."""

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


@pytest.mark.parametrize("name", ["lassen-v100", "lassen-v100-peak", "cori-knl"])
def test_every_number_has_a_source(name: str) -> None:
    lassen = load_machine(name)
    sources = [source.key for source in lassen.sources]
    seen = 0
    for key, number in numbers(lassen.model_dump(mode="json", exclude={"sources"})):
        if key in ABOUT or key.endswith((".channels", ".thickness")):
            continue
        if (key.startswith("hidden.") and number == 1) or (key == "reserved" and not number):
            continue  # as the paper assumes; not counted
        if key.endswith(NOT_KNOWN):
            assert number == 0, key
            continue
        assert any(key == source or key.startswith(f"{source}.") for source in sources), key
        seen += 1
    assert seen > 5


def test_nothing_was_measured_on_it() -> None:
    lassen = load_machine("lassen-v100")
    assert not any(setting.operators for setting in lassen.settings)
    assert not lassen.sums
    fitted = {one.key for one in lassen.sources if "fit" in one.text or "none" in one.text[:5]}
    assert fitted | {"reserved"} == FITTED
    peak = load_machine("lassen-v100-peak")
    assert peak.hidden.halos == peak.hidden.gradients == 1  # the assumption of the paper
    assert peak.node_sums is None
    assert peak.exchange is None


def convolutions(trace: Trace) -> list[LocalOperator]:
    return [one for one in trace.operators if one.call.name.startswith("aten.convolution")]


def test_speeds_of_convolutions_are_those_of_table_2() -> None:
    build = partial(models.CosmoFlow, 512)
    work = Workload(build, (1, 4, 512, 512, 512), (1, 4), loss=F.mse_loss)
    whole = convolutions(trace_step(work, {}, device="cuda"))
    total = sum(one.total_flops for one in whole)
    first = sum(one.total_flops for one in whole if one.layer.endswith("conv1"))
    for name in ("lassen-v100", "lassen-v100-peak"):
        rates = {
            (rate.channels, rate.thickness): rate.rate
            for rate in load_machine(name).settings[0].rates
        }
        assert len(rates) == 4
        for ways in (8, 32):
            conv1, everything = LOCAL[ways]
            if name == "lassen-v100-peak":
                conv1, everything = first / PEAK[ways][0], total / PEAK[ways][1]
            expected = first / conv1 / ways, (total - first) / (everything - conv1) / ways
            found = rates[4, 1 / ways], rates[16, 1 / ways]
            assert found == pytest.approx(expected, rel=2e-3), (name, ways)
