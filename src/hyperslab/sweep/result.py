"""What came of one run of a sweep: read from what it recorded, kept beside it when it is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from hyperslab.atomic_files import write_json
from hyperslab.documents import read_json
from hyperslab.errors import DataError
from hyperslab.report.run_folder import NEEDED_OF_EPOCHS, read_evaluation, read_table

FILE = "result.json"


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that is done: its epochs, and the least validation loss with its epoch, from 1.

    ``seconds`` [s] it trained. ``test`` are the scores of its best checkpoint on the test split by
    parameter or class, and ``test_mean`` of all together: squared errors over those of predicting
    the mean, or Dice; ``recalibrated`` those of recalibrated averages over volumes. They are empty
    where the run only chose a rate.
    """

    epochs: int
    validation_loss: float
    best_epoch: int
    seconds: float
    test: dict[str, float | None]
    test_mean: float | None = None
    recalibrated: dict[str, float | None] | None = None


_RESULT = TypeAdapter(RunResult)


def read_result(folder: Path) -> RunResult | None:
    """What was kept of a run that is done; None where it is not.

    Raises:
        DataError: the file is broken.
    """
    path = folder / FILE
    try:
        return _RESULT.validate_python(read_json(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(
            f"{path} is no result of a run: {where}: {first['msg']}; remove it"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no result of a run: {error!r}; remove it") from None


def collect_result(folder: Path, *, epochs: int, evaluated: bool) -> RunResult:
    """What came of a run that has just ended; writes it down, too.

    Raises:
        DataError: a file of the run is broken or shorter than it should be.
    """
    table = read_table(folder / "epochs.csv", NEEDED_OF_EPOCHS)
    losses = table.get("validation_loss", np.array([]))
    if len(losses) != epochs or not np.isfinite(losses).any():
        raise DataError(f"{folder / 'epochs.csv'} has not the losses of {epochs} epochs")
    best = int(np.nanargmin(losses))
    found = read_evaluation(folder / "evaluation" / "metrics.json") if evaluated else {}
    result = RunResult(
        epochs=epochs,
        validation_loss=float(losses[best]),
        best_epoch=best + 1,
        seconds=float(np.nansum(table["seconds"])),
        test=_scores(found),
        test_mean=_mean(found),
        recalibrated=_scores(found["recalibrated"]) if "recalibrated" in found else None,
    )
    write_json(folder / FILE, asdict(result))
    return result


def _scores(found: dict[str, Any]) -> dict[str, float | None]:
    if "classes" in found:
        return {name: row["dice"] for name, row in found["classes"].items()}
    return {name: row["ratio"] for name, row in found.get("parameters", {}).items()}


def _mean(found: dict[str, Any]) -> float | None:
    if "classes" in found:
        known = [dice for dice in _scores(found).values() if dice is not None]
        return float(np.mean(known)) if known else None
    return found["mean"]["ratio"] if "mean" in found else None
