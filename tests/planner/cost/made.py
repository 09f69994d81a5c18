"""Traces made by hand, and a machine whose times are round numbers."""

from __future__ import annotations

import datetime

import torch

from hyperslab.planner.calls import write_call
from hyperslab.planner.machine import (
    AllReduceFits,
    HiddenShares,
    LinearFit,
    Machine,
    Measured,
    Overhead,
    PowerFit,
    Setting,
)
from hyperslab.planner.records import (
    Call,
    Exchange,
    LocalOperator,
    Pass,
    Sum,
    TensorSpec,
    Trace,
    Wait,
)
from hyperslab.train.profile import Stage


def round_machine(
    *,
    hidden: float = 1.0,
    overhead: float = 0.0,
    times: dict[str, float] | None = None,
    calls: dict[Call, float] | None = None,
) -> Machine:
    """Operators take what ``times`` says by name, else 1 s; messages and sums 1 s a byte."""
    texts = {f"made.{name}(f32[1,4])": seconds for name, seconds in (times or {}).items()}
    texts |= {write_call(call): seconds for call, seconds in (calls or {}).items()}
    operators = tuple(Measured(call=text, seconds=seconds) for text, seconds in texts.items())
    setting = Setting(
        ranks=2,
        flops={"float32": 1},
        bandwidth=32,
        overhead=Overhead(operator=overhead),
        operators=operators,
    )
    return Machine(
        name="round",
        date=datetime.date(2020, 1, 1),
        versions={},
        processor="none",
        ranks_per_node=8,
        ranks_per_socket=8,
        memory=1 << 30,
        settings=(setting,),
        links={"device": (LinearFit(latency=0, bandwidth=1),)},
        sums=(AllReduceFits(ranks=2, pieces=(PowerFit(scale=1, exponent=1),)),),
        hidden=HiddenShares(halos=hidden, gradients=hidden),
    )


def operator(
    name: str, stage: Stage = "forward", layer: str = "conv", flops: dict[Pass, int] | None = None
) -> LocalOperator:
    spec = TensorSpec((1, 4), (4, 1), torch.float32)
    return LocalOperator(
        Call(f"made.{name}", (spec,)), layer, stage, tuple((flops or {}).items()), 16, 16
    )


def exchange(nbytes: int, stage: Stage = "forward", peers: tuple[int, ...] = (1,)) -> Exchange:
    messages = tuple((peer, nbytes) for peer in peers)
    return Exchange("conv", stage, "halos of a convolution", messages, messages)


def gradients(nbytes: int) -> Sum:
    return Sum("", "backward", "a bucket", "gradients", (0, 1), nbytes)


def statistics(nbytes: int) -> Sum:
    return Sum("norm", "forward", "statistics", "statistics", (0, 1), nbytes)


def trace(*events: LocalOperator | Exchange | Wait | Sum, **sizes: int) -> Trace:
    return Trace(0, list(events), **sizes)
