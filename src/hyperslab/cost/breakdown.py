"""What a step's seconds are spent on, as a whole and by layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hyperslab.trace.records import Pass

PhaseName = Pass | str
"""A pass of Oyama et al. 2020, or "optimizer"."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A step's time by cause [s]; they add up to the step.

    ``forward``, ``backward_data`` and ``backward_filter`` are FP, BD and BF of Oyama et al. 2020,
    section III-C, without the communication in them: the sums over the layers of
    Comp(D_main) + Comp(D_halo). Operators of the backward pass that are no convolution count as
    BD, for they hand a gradient on. ``halos`` and ``gradients`` are what of these messages no
    work hides; of ``statistics`` (batch norm's all-reduce, section III-C) nothing is hidden.
    ``optimizer``, ``overhead`` (what Python and the rules take between operators) and ``input``
    (waiting for data) are neglected by the paper.
    """

    forward: float = 0.0
    backward_data: float = 0.0
    backward_filter: float = 0.0
    halos: float = 0.0
    statistics: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0
    input: float = 0.0

    @property
    def total(self) -> float:
        """The step [s]."""
        return sum(dataclasses.astuple(self))

    @property
    def compute(self) -> float:
        """Operators alone [s]."""
        return self.forward + self.backward_data + self.backward_filter + self.optimizer

    def as_dict(self) -> dict[str, float]:
        """By name [s]."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer in one pass: ``operators`` calls take ``compute`` [s] for ``flops``.

    ``waiting`` [s] is for its halos and statistics; ``overhead`` [s] is Python's.
    """

    layer: str
    phase: PhaseName
    operators: int
    flops: int
    compute: float
    waiting: float
    overhead: float

    @property
    def seconds(self) -> float:
        return self.compute + self.waiting + self.overhead
