"""What a tensor carries through a network beside its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hyperslab.tensor.gradient_homes import GradientHomes


@dataclass(frozen=True, slots=True)
class Policy:
    """Choices that travel with a tensor through a network.

    ``batch_norm``: statistics over the whole ``"grid"`` (the serial result) or per ``"replica"``.
    ``kernels``: those of convolutions by measurement, by a fixed rule, or as torch chooses.
    ``shares_filters``: whether ranks share the filters of large layers that are not cut, instead of
    repeating each other's work. Then all ranks must call such a layer, as inside a parallelised
    module; elsewhere a tensor that is not cut needs no message.
    ``homes``: where the gradients of the module's parameters are averaged.
    """

    batch_norm: str = "grid"
    kernels: Literal["measure", "fixed", "torch"] = "measure"
    shares_filters: bool = False
    homes: GradientHomes | None = field(default=None, compare=False)
