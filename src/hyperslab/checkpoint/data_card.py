"""The data card of a checkpoint: what its network was trained on, so far as its use needs it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hyperslab.formats.targets import Parameters


@dataclass(frozen=True, slots=True)
class DataCard:
    """``shape`` (C, D, H, W) of a sample and ``whole`` of the volume that it may be a part of.

    Voxels have ``classes``, or volumes have ``parameters``. ``redshifts``: of the channels, where
    they are known; ``stored_redshifts``: of those of the files, where only some were shown.
    ``dtype``: of stored values. ``varied``: volumes differ in shape, which is then that of the
    largest. ``voxel``: the size along D, H and W [mm] that all of them have, where they have one.
    ``channels``: what these are, where that is known.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    classes: tuple[str, ...]
    parameters: Parameters
    redshifts: tuple[float, ...] = ()
    stored_redshifts: tuple[float, ...] = ()
    dtype: str = "int16"
    varied: bool = False
    voxel: tuple[float, ...] = ()
    channels: tuple[str, ...] = ()

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> DataCard:
        """The same from what `state` gave."""
        parameters = {key: _tuple(value) for key, value in state["parameters"].items()}
        rest: dict[str, Any] = {key: tuple(state[key]) for key in ("shape", "whole", "classes")}
        named = ("redshifts", "stored_redshifts", "voxel", "channels")
        known: dict[str, Any] = {key: tuple(state.get(key, ())) for key in named}
        known |= {key: state[key] for key in ("dtype", "varied") if key in state}
        return cls(**rest, parameters=Parameters(**parameters), **known)

    @property
    def file_shape(self) -> tuple[int, ...]:
        """(C, D, H, W) of the volumes in the files, with channels that were not shown."""
        channels = len(self.stored_redshifts) or self.whole[0]
        return (channels, *self.whole[1:])

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value
