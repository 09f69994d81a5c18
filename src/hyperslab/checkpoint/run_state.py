"""Saves and restores the state of a run: its weights, how far it is, and its random numbers.

`DataCard` says what its network was trained on, so far as the use of the network needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter, ValidationError

from hyperslab.checkpoint.files import read_values
from hyperslab.errors import CheckpointError, HyperslabError, RecipeError, reason
from hyperslab.formats.targets import Parameters

if TYPE_CHECKING:  # a command looks at a `DataCard` before it imports torch
    import torch


@dataclass(frozen=True, slots=True)
class DataCard:
    """Says what a network was trained on: volumes have ``parameters``, or voxels ``classes``."""

    shape: tuple[int, ...]  # (C, D, H, W) of a sample
    whole: tuple[int, ...]  # of the volume that it may be a part of
    classes: tuple[str, ...]
    parameters: Parameters
    redshifts: tuple[float, ...] = ()  # of the channels, where they are known
    stored_redshifts: tuple[float, ...] = ()  # of those in files, where only some were shown
    dtype: str = "int16"  # of stored values
    varied: bool = False  # volumes differ in shape, which is then that of the largest
    voxel: tuple[float, ...] = ()  # the size along D, H, W [mm] that all have, if they have one
    channels: tuple[str, ...] = ()  # what these are, where that is known

    @classmethod
    def from_state(cls, state: dict[str, Any], path: Path) -> DataCard:
        """Returns what the checkpoint ``path`` has kept as plain values."""
        try:
            return TypeAdapter(cls).validate_python(state)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, ("about", *first["loc"])))
            raise CheckpointError(
                f"{path} does not say what its network was trained on: {where}: {first['msg']}"
            ) from None

    @classmethod
    def of_checkpoint(cls, path: Path) -> DataCard | None:
        """Read the one of a checkpoint, and none of its tensors; None where it has none."""
        extra = read_values(path)["extra"]
        return cls.from_state(_unmarked(extra["about"]), path) if "about" in extra else None

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Return (C, D, H, W) of the volumes in the files, with channels that were not shown."""
        channels = len(self.stored_redshifts) or self.whole[0]
        return (channels, *self.whole[1:])


def _unmarked(value: Any) -> Any:
    """Take what stands under the marks of an encoded value: lists, and numbers as words."""
    if isinstance(value, dict):
        mark = next(iter(value), "")
        return (
            _unmarked(value[mark])
            if mark.startswith("$")
            else {key: _unmarked(item) for key, item in value.items()}
        )
    return [*map(_unmarked, value)] if isinstance(value, list) else value


class KeepsAverages(Protocol):
    """Averages weights over steps, so far as a checkpoint is concerned."""

    values: dict[str, torch.Tensor]

    def restore(self, state: Mapping[str, torch.Tensor] | None, path: Path) -> None: ...


class KeepsState(Protocol):
    """A learning rate's schedule, or the scale of a loss, so far as a checkpoint is concerned."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Position:
    """Says how far a run is, in mini-batches of the whole grid, so the same on every grid."""

    step: int = 0  # of the optimizer, all epochs together
    epoch: int = 0
    batch: int = 0  # mini-batches of this epoch that are done
    loss: float = 0.0  # of this epoch, summed over its samples
    samples: int = 0  # of this epoch
    seconds: float = 0.0  # that this epoch has taken
    best: float | None = None  # lowest validation loss at a checkpoint
    best_step: int | None = None  # of that checkpoint
    measured: dict[str, float | None] = field(default_factory=dict)  # by the last validation


def check_resumes(state: Mapping[str, Any], path: Path, batch_size: int, samples: str) -> None:
    """Refuse to go on from the ``state`` of a checkpoint where its position means something else.

    Raises:
        RecipeError: its mini-batches had another size, or its training split was another one.
    """
    if state["batch_size"] != batch_size:
        raise RecipeError(
            f"data.batch_size is {batch_size} but {path} was written with "
            f"{state['batch_size']}\n    keep that value, or start another run"
        )
    if state.get("samples", samples) != samples:
        raise RecipeError(
            f"the training split is not the one that {path} was trained on: data.seed, "
            "data.fractions, data.counts, data.train, data.fold, data.repeat, data.subvolume, "
            "data.table, data.ranges or the files in data.path have changed\n"
            "    samples that it was trained on must not change splits: change them back, or "
            "start another run"
        )


@dataclass(frozen=True, slots=True)
class RunState:
    """Holds what a checkpoint of a run has besides its `Position`.

    The random numbers are those of torch's default generators, for the CPU and for ``device``.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: KeepsState
    batch_size: int
    samples: str  # the digest of the training split
    about: DataCard
    device: torch.device
    scaler: KeepsState
    average: KeepsAverages | None = None

    def extra(self, at: Position) -> dict[str, Any]:
        """Return what a checkpoint at this position holds besides model and optimizer."""
        import torch

        scale = self.scaler.state_dict()
        random = {"cpu": torch.get_rng_state()}  # the same on every rank
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "about": asdict(self.about),
            "position": asdict(at),
            "schedule": self.schedule.state_dict(),
            "random": random,
            "batch_size": self.batch_size,
            "samples": self.samples,
            **({} if self.average is None else {"ema": self.average.values}),
            **({"scaler": scale} if scale else {}),
        }

    def restore(self, path: Path) -> Position:
        """Go back to a checkpoint, written on any grid, and say where that is.

        Raises:
            CheckpointError: it cannot be read, or is of another network or no run's.
            RecipeError: as `check_resumes`, or what was shown of the data was something else.
        """
        import torch

        from hyperslab.checkpoint.save_load import load

        state = load(path, self.model, self.optimizer)
        try:
            check_resumes(state, path, self.batch_size, self.samples)
            if "about" in state:
                self._check_shown(DataCard.from_state(state["about"], path), path)
            self.schedule.load_state_dict(state["schedule"])
            self.scaler.load_state_dict(state.get("scaler", {}))
            if self.average is not None:
                self.average.restore(state.get("ema"), path)
            torch.set_rng_state(state["random"]["cpu"])
            if self.device.type == "cuda" and "cuda" in state["random"]:
                torch.cuda.set_rng_state(state["random"]["cuda"], self.device)
            return TypeAdapter(Position).validate_python(state["position"])
        except HyperslabError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{path} holds no state of a run: {reason(error)}") from None

    def _check_shown(self, then: DataCard, path: Path) -> None:
        """Refuse other targets or redshifts, of which there may be as many."""
        now = self.about
        names = then.parameters.names == now.parameters.names
        if not names or (then.redshifts and then.redshifts != now.redshifts):
            raise RecipeError(
                f"{path} was trained on data.targets {list(then.parameters.names)} and "
                f"data.redshifts {list(then.redshifts)}, now they are "
                f"{list(now.parameters.names)} and {list(now.redshifts)}\n"
                "    keep the former ones, or start another run"
            )
