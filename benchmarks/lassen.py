"""Predictions of a published run: its step, its memory, and what other assumptions make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from published import Run
from torch import nn

import hyperslab as hs
from hyperslab.planner.cost import RankMemory, StepCost, exposed_input, rank_memory, step_cost
from hyperslab.planner.machine import HiddenShares, Machine
from hyperslab.planner.records import Trace
from hyperslab.planner.trace import Device, Workload, busiest, trace_step


def workload(run: Run) -> Workload:
    """A step with Adam; batch norm's statistics are those of a sample, as the paper sums them."""
    volume = (run.width,) * 3
    if run.network == "sc18":
        return Workload(
            partial(hs.models.CosmoFlow, run.width, variant="sc18"),
            inputs=(run.samples, 1, *volume),
            target=(run.samples, 3),
            loss=F.l1_loss,
            optimizer=torch.optim.Adam,
        )
    if run.network == "cosmoflow":
        return Workload(
            partial(hs.models.CosmoFlow, run.width, batch_norm=run.batch_norm),
            inputs=(run.samples, 4, *volume),
            target=(run.samples, 4),
            loss=F.mse_loss,
            optimizer=torch.optim.Adam,
            batch_norm="replica",
        )
    return Workload(
        hs.models.UNet3D,
        inputs=(run.samples, 1, *volume),
        target=(run.samples, *volume),
        target_dtype=torch.int64,
        target_channels=False,
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam,
        batch_norm="replica",
    )


@cache
def trace(run: Run) -> Trace:
    """Of the busiest rank."""
    return trace_step(workload(run), run.extents, busiest(run.extents), "cuda")


def cost(run: Run, machine: Machine) -> StepCost:
    return step_cost(trace(run), machine, run.gpus)


def input_seconds(run: Run, machine: Machine, step: float) -> float:
    """What a step of so many seconds waits for its samples, which are int16."""
    channels = 1 if run.network == "unet3d" else 4
    replicas = run.gpus // run.ways
    samples = 2 * channels * run.width**3 * run.samples // replicas
    if run.input == "sample":  # through one rail to the node that reads, and nothing hides it
        return machine.message_seconds(samples, "network")
    if run.input == "direct":
        return 0.0
    travels = 1 - 1 / replicas
    nbytes = samples // run.ways
    shares = machine.hidden.model_copy(update={"exchange": 0.0})  # the paper's program waits for it
    waits = machine.model_copy(update={"hidden": shares})
    return exposed_input(waits, nbytes, run.gpus, step, reads=False, travels=travels)


def step_seconds(run: Run, machine: Machine) -> float:
    """The step with its wait for samples [s]."""
    step = cost(run, machine).seconds.total
    return step + input_seconds(run, machine, step)


def speed(run: Run, machine: Machine) -> float:
    """[samples/s]"""
    return run.samples / step_seconds(run, machine)


def local_kernels(run: Run, layers: str, machine: Machine) -> float:
    """Of a rank's own blocks, without halos and without repeated work [s].

    The main kernel of each layer and stage; of a map that is gathered, this rank's share of it.
    """
    setting = machine.setting(run.gpus)
    longest: dict[tuple[str, str], tuple[int, float]] = {}
    for operator in trace(run).operators:
        if operator.call.name.startswith("aten.convolution") and operator.layer.startswith(layers):
            key = (operator.layer, operator.stage)
            found = (operator.total_flops, setting.estimate(operator).seconds)
            longest[key] = max(longest.get(key, (0, 0.0)), found)
    whole = _flops_of_layers(replace(run, gpus=1, ways=1))
    return sum(
        seconds * min(1.0, whole[key] / run.ways / flops)
        for key, (flops, seconds) in longest.items()
    )


def _flops_of_layers(run: Run) -> dict[tuple[str, str], int]:
    total: dict[tuple[str, str], int] = {}
    for operator in trace(run).operators:
        key = (operator.layer, operator.stage)
        total[key] = total.get(key, 0) + operator.total_flops
    return total


def kept_by_table_1(run: Run) -> int:
    """As Table I counts [B]: every layer's output and its gradient, and the input twice."""
    channels = 4 if run.network == "cosmoflow" else 1
    found = layer_by_layer(workload(run), run.extents, busiest(run.extents), "cuda")
    forward = (op for op in found.operators if op.stage == "forward" and op.layer)
    outputs = sum(operator.written for operator in forward) // 2
    return 2 * (outputs + 2 * 4 * channels * run.width**3)


def layer_by_layer(
    step: Workload, extents: Mapping[str, int], rank: int = 0, device: Device = "cpu"
) -> Trace:
    """A step in float64, in which every layer writes its output: nothing is fused there."""

    def build() -> nn.Module:
        model = step.build().double()
        model.register_forward_pre_hook(lambda _, args: (args[0].double(), *args[1:]))
        return model

    return trace_step(replace(step, build=build), extents, rank, device)


def memory(run: Run, machine: Machine) -> int:
    """Of the busiest GPU [B]."""
    return rank_memory(trace(run), machine, run.gpus, RankMemory()).total


def with_nothing_hidden(machine: Machine) -> Machine:
    """Every message is waited for."""
    return machine.model_copy(update={"hidden": HiddenShares(halos=0.0, gradients=0.0)})


def with_one_rate(machine: Machine) -> Machine:
    """Convolutions on thinner blocks are no faster than on those of 8 GPUs a sample."""
    setting = machine.settings[0]
    slowest = {}
    for rate in setting.rates:
        slowest.setdefault(rate.channels, rate)  # the 8-way one stands first
    rates = tuple(slowest.values())
    return machine.with_setting(setting.model_copy(update={"rates": rates}))


def with_latency(machine: Machine, seconds: float) -> Machine:
    """Every message takes so much longer; the machine file has no latencies."""
    links = {
        name: tuple(piece.model_copy(update={"latency": seconds}) for piece in pieces)
        for name, pieces in machine.links.items()
    }
    return machine.model_copy(update={"links": links})
