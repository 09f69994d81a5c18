"""Traces a training step without data: what every rank would compute, send and keep."""

from hyperslab.planner.trace.records import (
    Call,
    Exchange,
    LocalOperator,
    Sum,
    TensorSpec,
    Trace,
    Wait,
)
from hyperslab.planner.trace.step import Workload, trace_step
from hyperslab.planner.trace.virtual_grid import busiest, positions

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
