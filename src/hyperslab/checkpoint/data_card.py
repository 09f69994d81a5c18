"""The data card of a checkpoint: what its network was trained on, so far as its use needs it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hyperslab.formats.parameters import Parameters


@dataclass(frozen=True, slots=True)
class DataCard:
    """``shape`` (C, D, H, W) of a sample and ``whole`` of the volume that it may be a part of.

    Voxels have ``classes``, or volumes have ``parameters``.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    classes: tuple[str, ...]
    parameters: Parameters

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> DataCard:
        """The same from what `state` gave."""
        parameters = {key: _tuple(value) for key, value in state["parameters"].items()}
        rest = {key: tuple(state[key]) for key in ("shape", "whole", "classes")}
        return cls(**rest, parameters=Parameters(**parameters))

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value
