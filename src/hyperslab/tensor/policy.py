"""What a tensor carries through a network beside its numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Choices that travel with a tensor through a network.

    ``batch_norm``: statistics over the whole ``"grid"`` (the serial result) or per ``"replica"``.
    """

    batch_norm: str = "grid"
