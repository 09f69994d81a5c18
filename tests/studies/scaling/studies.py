"""Studies written by hand, with times that look like real ones."""

from __future__ import annotations

from hyperslab.planner.cost import Breakdown
from hyperslab.recipe.schema import GridSection
from hyperslab.studies.scaling.points import ScalingKind, ScalingPoint
from hyperslab.studies.scaling.study import MeasuredStep, PredictedStep, Study, StudyRow


def breakdown(seconds: float) -> Breakdown:
    return Breakdown(
        forward=0.25 * seconds,
        backward_data=0.2 * seconds,
        backward_filter=0.25 * seconds,
        halos=0.1 * seconds,
        gradients=0.05 * seconds,
        optimizer=0.05 * seconds,
        overhead=0.1 * seconds,
    )


def measurement(seconds: float, samples: int, crowded: str = "") -> MeasuredStep:
    return MeasuredStep(seconds, 0.98 * seconds, 1.05 * seconds, 12, samples, 0.0, 2.0**28, crowded)


def predicted_step(seconds: float, *, fits: bool) -> PredictedStep:
    return PredictedStep(breakdown(seconds), 2**34, 2 ** (34 if fits else 33))


def study(kind: ScalingKind, ranks: list[int], *, measured: int, predicted: int) -> Study:
    """The first so many points are measured, the last so many predicted; 0.1 s is not shared."""
    rows = []
    for place, count in enumerate(ranks):
        strong = kind is ScalingKind.STRONG
        grid = GridSection(data=8, depth=count // 8) if strong else GridSection(data=count)
        batch = 8 if strong else 2 * count
        seconds = 0.1 + 10 / count if strong else 1 + 0.02 * place**2
        is_predicted = place >= len(ranks) - predicted
        crowded = "too many" if place == measured - 1 > 0 else ""
        rows.append(
            StudyRow(
                ScalingPoint(grid, batch),
                batch,
                measurement(1.1 * seconds, batch, crowded) if place < measured else None,
                predicted_step(seconds, fits=count < 2048) if is_predicted else None,
            )
        )
    return Study(kind, "hand", tuple(rows), "some-machine" if predicted else "")
