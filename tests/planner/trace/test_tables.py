"""The tables of the two papers come out of traces (tier: no process)."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch.nn.functional as F

from hyperslab import models
from hyperslab.planner.records import LocalOperator, TensorSpec, Trace
from hyperslab.planner.trace import Workload, trace_step

GIB = 2**30


@cache
def oyama(width: int) -> Trace:
    """One sample on one device, with torch's own convolutions."""
    shapes = ((1, 4, width, width, width), (1, 4))
    step = Workload(lambda: models.CosmoFlow(width), *shapes, loss=F.mse_loss)
    return trace_step(step, {}, device="cuda")


@cache
def layer_by_layer(width: int, batch_norm: bool = False) -> Trace:
    """The same in float64, in which every layer writes its output: nothing is fused there."""

    def build() -> models.CosmoFlow:
        model = models.CosmoFlow(width, batch_norm=batch_norm).double()
        model.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        return model

    shapes = ((1, 4, width, width, width), (1, 4))
    return trace_step(Workload(build, *shapes, loss=F.mse_loss), {}, device="cuda")


def convolutions(trace: Trace) -> list[LocalOperator]:
    return [op for op in trace.operators if op.call.name.startswith("aten.convolution")]


def kept_by_lbann(trace: Trace, width: int) -> float:
    """The memory of a sample [GiB] as table I counts it, from a trace in float64.

    Every 3D layer has its output and the gradient of it, and the input passes through two layers
    (the text does not say so; the three numbers do, to their last digit).
    """
    layers = [op for op in trace.operators if op.layer.startswith("features")]
    outputs = sum(op.written for op in layers if op.stage == "forward") / 2
    return 2 * (outputs + 2 * 4 * 4 * width**3) / GIB


@pytest.mark.parametrize(
    ("width", "forward", "total", "memory"),
    [(128, 18.52, 55.55, 0.824), (256, 147.9, 443.8, 6.59), (512, 1183.0, 3550.0, 52.7)],
)
def test_table_1_of_oyama_et_al(width: int, forward: float, total: float, memory: float) -> None:
    trace = oyama(width)
    counts = {
        name: sum(count for op in convolutions(trace) for kind, count in op.flops if kind == name)
        for name in ("forward", "backward-data", "backward-filter")
    }
    assert counts["forward"] / 1e9 == pytest.approx(forward, rel=5e-4)
    assert counts["backward-filter"] == counts["forward"]
    # The paper counts three times the forward pass; the gradient of the input is not needed.
    first = sum(op.total_flops for op in convolutions(trace) if "1" in op.layer) / 2
    assert counts["backward-data"] == counts["forward"] - first
    assert 3 * counts["forward"] / 1e9 == pytest.approx(total, rel=5e-4)
    assert kept_by_lbann(layer_by_layer(width), width) == pytest.approx(memory, rel=1e-3)
    assert trace.parameters / 4e6 == pytest.approx(9.44, abs=0.005)


@pytest.mark.parametrize("width", [128, 256, 512])
def test_batch_norm_takes_40_percent_more_and_not_double(width: int) -> None:
    """Section IV says that memory requirements double; a layer's output more makes 1.4."""
    plain = kept_by_lbann(layer_by_layer(width), width)
    normalised = kept_by_lbann(layer_by_layer(width, batch_norm=True), width)
    assert normalised / plain == pytest.approx(1.40, abs=0.005)


# Table I of Mathuriya et al. 2018: [ms] and [Tflop/s] of forward, weights' and data's gradient.
MATHURIYA = {
    "conv1": [(1.46, 1.18), (0.78, 2.22)],
    "conv2": [(4.13, 3.43), (6.59, 2.15), (6.81, 2.41)],
    "conv3": [(0.97, 5.32), (0.77, 6.70), (1.12, 6.32)],
}


@cache
def mathuriya() -> Trace:
    def build() -> models.CosmoFlow:
        return models.CosmoFlow(128, variant="sc18")

    shapes = ((1, 1, 128, 128, 128), (1, 3))
    return trace_step(Workload(build, *shapes, loss=F.l1_loss), {}, device="cuda")


def by_input(op: LocalOperator) -> int:
    """Flops of the data's gradient as that paper counts them: all taps for every input voxel.

    Without padding those at the edge meet fewer outputs, so that is more than there is to do.
    """
    _, x, weight = op.call.arguments[:3]
    assert isinstance(x, TensorSpec)
    assert isinstance(weight, TensorSpec)
    return 2 * math.prod(x.shape[2:]) * math.prod(weight.shape)


def test_table_1_of_mathuriya_et_al() -> None:
    ops = convolutions(mathuriya())
    for layer, published in MATHURIYA.items():
        mine = [op for op in ops if op.layer == f"features.{layer}"]
        counts = {name: count for op in mine for name, count in op.flops}
        found = [counts["forward"], counts["backward-filter"]]
        if "backward-data" in counts:
            found.append(sum(by_input(op) for op in mine if "backward" in op.stage))
        assert len(found) == len(published)
        for count, (milliseconds, rate) in zip(found, published, strict=True):
            assert count / 1e9 == pytest.approx(milliseconds * rate, rel=0.01)


def test_flops_and_parameters_of_mathuriya_et_al() -> None:
    """69.33 Gflop, 28.15 MB: data's gradients by input voxels, the first layer's too, and dense
    layers three times."""
    trace = mathuriya()
    backward = [op for op in convolutions(trace) if op.stage == "backward"]
    dense = [op for op in trace.operators if "addmm" in op.call.name]
    total = trace.flops("forward") + sum(map(by_input, backward))
    total += sum(count for op in backward for name, count in op.flops if name == "backward-filter")
    total += 2 * sum(op.total_flops for op in dense)
    assert total / 1e9 == pytest.approx(69.33, abs=0.01)
    assert trace.parameters / 1e6 == pytest.approx(28.15, rel=1e-3)
