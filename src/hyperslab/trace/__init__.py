"""A step of a network, run without data: what every rank would compute, send and keep."""

from hyperslab.trace.positions import busiest, positions
from hyperslab.trace.records import (
    Call,
    Exchange,
    LocalOperator,
    Sum,
    TensorSpec,
    Trace,
    Wait,
)
from hyperslab.trace.step import Workload, trace_step

__all__ = [
    "Call",
    "Exchange",
    "LocalOperator",
    "Sum",
    "TensorSpec",
    "Trace",
    "Wait",
    "Workload",
    "busiest",
    "positions",
    "trace_step",
]
