"""How fast ranks compute when so many of them run at once on a node."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import torch
from pydantic import AfterValidator, NonNegativeFloat, PositiveFloat, PositiveInt

from hyperslab.machine.call_text import read_call, write_call
from hyperslab.machine.estimate import (
    Estimate,
    Known,
    kind,
    only_pass,
    roofline,
    slowed_as_near,
)
from hyperslab.machine.links import Residual
from hyperslab.machine.part import Part
from hyperslab.machine.rates import Rate, published_rate
from hyperslab.trace.records import Call, LocalOperator, Pass


def _valid_call(text: str) -> str:
    read_call(text)
    return text


def _known_dtypes(names: dict[str, float]) -> dict[str, float]:
    for name in names:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{name!r} is no dtype of torch: write float32, bfloat16 ...")
    if "float32" not in names:
        raise ValueError("the peak of float32 is missing")
    return names


class Measured(Part):
    """A call that was timed; ``bytes`` are those that it reads and writes."""

    call: Annotated[str, AfterValidator(_valid_call)]
    seconds: PositiveFloat
    flops: NonNegativeFloat = 0
    bytes: NonNegativeFloat = 0

    @cached_property
    def parsed(self) -> Call:
        return read_call(self.call)


class Overhead(Part):
    """Python and launch, beside the operators' own times."""

    operator: NonNegativeFloat = 0  # [s] for each operator of a step
    step: NonNegativeFloat = 0  # [s] for each step
    residual: Residual | None = None


class Setting(Part):
    """Speeds of one rank while ``ranks`` ranks of ``threads`` threads work on a node."""

    ranks: PositiveInt
    threads: PositiveInt = 1
    flops: Annotated[dict[str, PositiveFloat], AfterValidator(_known_dtypes)]  # [flop/s] at most
    bandwidth: PositiveFloat  # [B/s] of memory
    launch: NonNegativeFloat = 0  # [s] that the smallest operator takes
    overhead: Overhead = Overhead()
    rates: tuple[Rate, ...] = ()  # published, of convolutions that were not measured
    operators: tuple[Measured, ...] = ()

    def estimate(self, operator: LocalOperator) -> Estimate:
        """How long the operator takes, Python's overhead beside it not counted."""
        if operator.call not in self._estimates:
            self._estimates[operator.call] = self._estimate(operator)
        return self._estimates[operator.call]

    def estimate_pass(self, operator: LocalOperator, name: Pass) -> Estimate:
        """One of its passes alone; see `only_pass`."""
        return self.estimate(only_pass(operator, name))

    def roofline_of(self, operator: LocalOperator) -> float:
        """The least time [s] at this setting, a launch included."""
        return self._least(operator.call, operator.total_flops, operator.read + operator.written)

    def share_of_peak(self, flops_per_second: float, dtype: torch.dtype) -> float:
        """How much of a rank's peak that is."""
        return flops_per_second / self._peak(dtype)

    @cached_property
    def measured(self) -> dict[Call, Measured]:
        """By call."""
        return {entry.parsed: entry for entry in self.operators}

    @cached_property
    def _estimates(self) -> dict[Call, Estimate]:
        return {}

    @cached_property
    def _kinds(self) -> dict[tuple[object, ...], list[Known]]:
        kinds: dict[tuple[object, ...], list[Known]] = {}
        for call, entry in self.measured.items():
            least = self._least(call, entry.flops, entry.bytes)
            kinds.setdefault(kind(call), []).append(Known(call, entry.seconds, least))
        return kinds

    def _estimate(self, operator: LocalOperator) -> Estimate:
        entry = self.measured.get(operator.call)
        if entry is not None:
            return Estimate(entry.seconds, "measured")
        least = self.roofline_of(operator)
        known = self._kinds.get(kind(operator.call))
        if known:
            return Estimate(slowed_as_near(operator.call, least, known), "interpolated")
        rate = published_rate(operator.call, self.rates)
        if rate is not None:
            least = max(least, self.launch + operator.total_flops / rate)
        return Estimate(least, "modelled")

    def _least(self, call: Call, flops: float, nbytes: float) -> float:
        dtype = next((spec.dtype for spec in call.tensors()), torch.float32)
        return self.launch + roofline(flops, nbytes, self._peak(dtype), self.bandwidth)

    def _peak(self, dtype: torch.dtype) -> float:
        """[flop/s]; of float32 where the file has none of that dtype."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])


def entry_of(operator: LocalOperator, seconds: float) -> Measured:
    """What a machine file keeps of a measured operator."""
    return Measured(
        call=write_call(operator.call),
        seconds=float(f"{seconds:.5g}"),  # as many digits as a measurement has
        flops=operator.total_flops,
        bytes=operator.read + operator.written,
    )
