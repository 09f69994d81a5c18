"""What a tensor carries through a network beside its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Policy:
    """Choices that travel with a tensor through a network.

    ``batch_norm``: statistics over the whole ``"grid"`` (the serial result) or per ``"replica"``.
    ``kernels``: those of convolutions by measurement, by a fixed rule, or as torch chooses.
    """

    batch_norm: str = "grid"
    kernels: Literal["measure", "fixed", "torch"] = "measure"
