"""Describes the profile of a few steps: the file ``RUN/profile/rank-R.json``, one a rank.

``predicted.json`` is alike. `hyperslab.train.profiler` makes them of a run.

Legend: a *row* is one line of a timeline; a *span* is a piece of it, from begin to end [s] after
the step's begin. Rows that a rank works or waits in never overlap; `UNDER_WAY` is beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hyperslab.errors import DataError, reason
from hyperslab.util.atomic_files import write_json
from hyperslab.util.documents import check_json_memory, read_bytes

T = TypeVar("T")

Stage = Literal["forward", "backward", "optimizer"]

TimelineRow = Literal[
    "convolutions", "operators", "halos", "statistics", "gradients", "data", "vote", "framework"
]
"""Names what a rank does: operators of two kinds, what it waits for, and the rest.

``convolutions`` and ``operators`` (all others) are compute; ``halos``, ``statistics`` (every sum
over ranks within a pass) and ``gradients`` are time in which communication holds the rank up;
``data`` is waiting for a mini-batch, ``vote`` for the ranks' agreement about the step before;
``framework`` is the rest of the two passes, the optimizer and the history: Python, and torch
between its operators.
"""

ROWS: tuple[TimelineRow, ...] = get_args(TimelineRow)

UNDER_WAY = "under way"  # added to a row's name: messages that travel while the rank works on

TimelineSpan = tuple[float, float, int]
"""Begin and end [s] after the step's begin; the index of its words in ``Profile.labels``."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerTime(_Strict):
    """Holds the time that a step spends in one layer and stage [s], a mean over the profiled steps.

    ``layer`` is the submodule's name, "" what belongs to none; ``communication`` is what the rank
    waited there. Torch computes both gradients of a convolution in one operator, so ``backward``
    is BD and BF of Oyama et al. 2020, section III-C, together.
    """

    layer: str
    stage: Stage
    compute: float
    communication: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.communication


class StepTimes(_Strict):
    """Holds one step: its number, its time [s], the time in each row [s], and their spans."""

    step: int
    seconds: float
    rows: dict[TimelineRow, float]
    spans: dict[str, list[TimelineSpan]]

    @property
    def covered(self) -> float:
        """Return the share of the step that the rows explain."""
        return sum(self.rows.values()) / self.seconds if self.seconds else 0.0


class Profile(_Strict):
    """Holds what one rank did in some steps; a prediction has layers alone.

    ``usual_seconds`` is the median of the steps before, without the profiler; ``peak`` [flop/s] is
    what this rank's device reaches in a matrix product; ``ended`` says why there are fewer steps
    than ``wanted``.
    """

    version: Literal[1] = 1
    kind: Literal["measured", "predicted"] = "measured"
    rank: int = 0
    ranks: int = 1
    grid: dict[str, int] = {}
    device: str = ""
    precision: str = ""
    torch: str = ""
    wanted: int = 0
    usual_seconds: float | None = None
    peak: float | None = None
    ended: str | None = None
    steps: list[StepTimes] = []
    layers: list[LayerTime] = []
    labels: list[str] = Field(default=[], repr=False)

    @property
    def median(self) -> StepTimes | None:
        """Return the step of median length, which is the one to show; None where there is none."""
        ordered = sorted(self.steps, key=lambda step: step.seconds)
        return ordered[len(ordered) // 2] if ordered else None


def profile_folder(run: Path) -> Path:
    return run / "profile"


def profile_path(run: Path, rank: int) -> Path:
    return profile_folder(run) / f"rank-{rank}.json"


def predicted_path(run: Path) -> Path:
    return profile_folder(run) / "predicted.json"


def write_profile(path: Path, profile: Profile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, profile.model_dump())


def read_document(path: Path, kind: TypeAdapter[T], what: str, again: str) -> T:
    """Read a JSON file that holds one object of a ``kind``, as errors call it by ``what``.

    Raises:
        DataError: it cannot be read or is none; names the file and the place, and what makes it
            ``again``.
    """
    try:
        data = read_bytes(path)
        check_json_memory(data)
        return kind.validate_json(data)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error
    except ValueError as error:
        words = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            words = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
        raise DataError(f"{path} is not {what}: {words}\n    remove it{again}") from error


_PROFILE = TypeAdapter(Profile)


def read_profile(path: Path) -> Profile:
    """Read a profile or a prediction; raises as `read_document`."""
    again = ", and profile again with hyperslab train --profile"
    return read_document(path, _PROFILE, "a profile", again)


def read_profiles(run: Path) -> list[Profile]:
    """Read a run's profiles by rank, none where there are none; raises as `read_profile`."""
    found = [read_profile(path) for path in profile_folder(run).glob("rank-*.json")]
    return sorted(found, key=lambda profile: profile.rank)
