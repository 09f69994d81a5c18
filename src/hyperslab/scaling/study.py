"""What a study found: times, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hyperslab.cost.breakdown import Breakdown
from hyperslab.scaling.points import RefusedPoint, ScalingKind, ScalingPoint


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The steps of one training, those of the first epoch left out.

    ``seconds`` is the median step, ``lower`` and ``upper`` are its quartiles [s], over ``steps``
    steps of ``samples`` samples each; ``waiting`` is the median wait for data [s]; ``memory`` the
    most that any rank has held [B]. ``crowded`` says why the times mean nothing, if they do not.
    """

    seconds: float
    lower: float
    upper: float
    steps: int
    samples: int
    waiting: float
    memory: float
    crowded: str = ""


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A step on a machine: its ``parts`` [s], and the ``memory`` of a rank of a ``limit`` [B].

    ``doubts`` say how far its times are to be trusted.
    """

    parts: Breakdown
    memory: int
    limit: int
    doubts: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.parts.total

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit


@dataclass(frozen=True, slots=True)
class StudyRow:
    """A point with its measured and its predicted step, either of which may not be there.

    ``samples`` are those of a step: of more than one mini-batch where gradients are accumulated.
    ``failure`` says why a training of it failed, if one did.
    """

    point: ScalingPoint
    samples: int
    measured: MeasuredStep | None = None
    predicted: PredictedStep | None = None
    failure: str = ""

    @property
    def measured_seconds(self) -> float | None:
        return None if self.measured is None else self.measured.seconds

    @property
    def predicted_seconds(self) -> float | None:
        return None if self.predicted is None else self.predicted.seconds

    @property
    def deviation(self) -> float | None:
        """Of the prediction: predicted / measured - 1."""
        if self.measured is None or self.predicted is None:
            return None
        return self.predicted.seconds / self.measured.seconds - 1


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a point is, relative to the smallest of the same study that has a time.

    ``throughput`` [samples/s]; ``speedup`` is its ratio to that of ``base`` ranks; ``efficiency``
    is the speed-up over the ratio of the ranks: 1 where so many more ranks do so much more.
    """

    throughput: float
    speedup: float
    efficiency: float
    base: int


@dataclass(frozen=True, slots=True)
class Study:
    """A strong or weak scaling study, its rows by ranks; ``machine`` is that of the predictions.

    ``refused`` are the points that were asked for and cannot be.
    """

    kind: ScalingKind
    recipe: str
    rows: tuple[StudyRow, ...]
    machine: str = ""
    refused: tuple[RefusedPoint, ...] = ()

    def measured(self) -> list[Speed | None]:
        """By row; None where nothing was measured."""
        return self._speeds(lambda row: row.measured_seconds)

    def predicted(self) -> list[Speed | None]:
        """By row; None where nothing was predicted."""
        return self._speeds(lambda row: row.predicted_seconds)

    def _speeds(self, seconds_of: Callable[[StudyRow], float | None]) -> list[Speed | None]:
        speeds: list[Speed | None] = []
        base: tuple[int, float] | None = None
        for row in self.rows:
            seconds = seconds_of(row)
            if seconds is None:
                speeds.append(None)
                continue
            throughput = row.samples / seconds
            base = base or (row.point.ranks, throughput)
            speedup = throughput / base[1]
            speeds.append(Speed(throughput, speedup, speedup * base[0] / row.point.ranks, base[0]))
        return speeds
