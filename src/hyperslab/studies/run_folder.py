"""Reads a run's folder back, and says what is there, what is missing and what is broken."""

from __future__ import annotations

import csv
import datetime
import itertools
import math
import os
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm import AXES
from hyperslab.errors import DataError, RecipeError, no_run
from hyperslab.recipe.compare import differences, settings_of, value_at
from hyperslab.recipe.load import load_recipe, read_yaml
from hyperslab.recipe.schema import Recipe
from hyperslab.train.history import LAYER_COLUMNS, LAYERS
from hyperslab.train.profile import Profile, predicted_path, read_profile, read_profiles
from hyperslab.util.documents import finished_lines, open_plain, read_json

T = TypeVar("T")

Columns = dict[str, NDArray[np.float64]]  # the columns of a CSV file by name, all equally long

Measures = dict[str, float | None]
"""Maps what an evaluation measured of a parameter or class; None where it is not defined."""

TEST = "test"
NEEDED_OF_STEPS = ("step", "epoch", "loss", "step_seconds", "wait_seconds", "samples_per_second")
TEXT_COLUMNS = ("sample", "volume")  # columns of an evaluation's CSV files that are not numbers
NEEDED_OF_EPOCHS = ("epoch", "train_loss", "validation_loss", "seconds")

LayerColumns = dict[str, dict[str, float]]
"""Maps each use of a layer in a step, in their order, to what was measured of it; NaN: nothing."""


@dataclass(frozen=True, slots=True)
class Run:
    """Holds what a training run left in its folder; a piece that is not there yet is empty.

    ``steps`` of a long run are one of each ``stride`` rows of its file, and the last one. So are
    ``layers``, by step, of those that were recorded.
    ``profiles`` are those of some steps, by rank; ``predicted`` is what they were expected to be;
    ``beside`` is another run, whose timeline is to be shown beside this one's.
    """

    path: Path
    recipe: dict[str, Any]
    steps: Columns
    epochs: Columns
    predictions: Columns
    evaluation: dict[str, Any]
    stride: int = 1
    profiles: Sequence[Profile] = ()
    predicted: Profile | None = None
    beside: Run | None = None
    layers: Mapping[int, LayerColumns] = field(default_factory=dict)

    def setting(self, key: str) -> Any:
        """Looks up a value of the recipe, such as ``"data.path"``; None where it is not set."""
        return value_at(self.recipe, key)

    @property
    def data(self) -> str | None:
        """Names the folder of volumes, or says in a word that they were made in memory."""
        path = self.setting("data.path")
        if source := self.setting("data.target") or self.setting("data.python_class"):
            return str(source)
        return "synthetic" if path is None and self.setting("data.synthetic") else path

    @property
    def segments(self) -> bool:
        """Tells if the network gives every voxel its class; others give numbers."""
        measured = any(name.startswith("validation_dice_") for name in self.epochs)
        return measured or bool(self.scores) or self.setting("model.name") == "unet3d"

    def called(self, section: str) -> str | None:
        """Returns what a section of the recipe names: a short form, or the class of its target."""
        value = self.setting(section)
        if not isinstance(value, dict):
            return value
        target = value.get("target") or value.get("python_class")
        return str(target).rpartition(".")[2] if target else value.get("name")

    @property
    def grid(self) -> dict[str, int]:
        """Returns the ranks along each axis of the grid."""
        return {axis: self.whole(f"grid.{axis}") or 1 for axis in AXES}

    @property
    def started(self) -> datetime.datetime | None:
        """Tells when the training first began [UTC], by the names of TensorBoard's files."""
        names = [file.name for file in (self.path / "tensorboard").glob("events.out.tfevents.*")]
        seconds = [
            int(match[1]) for name in names if (match := re.search(r"tfevents\.(\d{1,11})\b", name))
        ]
        return datetime.datetime.fromtimestamp(min(seconds), datetime.UTC) if seconds else None

    @property
    def split(self) -> str:
        """Names the split that was evaluated."""
        return evaluated_split(self.evaluation)

    @property
    def errors(self) -> dict[str, Measures]:
        """Returns the errors of each parameter that was evaluated; None where not defined."""
        return _finite_measures(self.evaluation.get("parameters", {}))

    @property
    def scores(self) -> dict[str, Measures]:
        """Returns the scores of each class that was evaluated, the background's first."""
        return _finite_measures(self.evaluation.get("classes", {}))

    def whole(self, key: str) -> int | None:
        """Returns a number of the recipe that is 1 or more; None where it is not set."""
        value = self.setting(key)
        if value is None or (isinstance(value, int) and value >= 1):
            return value
        raise DataError(
            f"{self.path / 'recipe.yaml'}: {key} is {value!r}, which is not a whole number from "
            "1 on"
        )


def folder_names(paths: Sequence[Path]) -> list[str]:
    """Names paths by their last parts, as many as tell them apart.

    >>> folder_names([Path("/a/runs/demo"), Path("/b/runs/demo")])
    ['a/runs/demo', 'b/runs/demo']
    """
    parts = [path.resolve().parts for path in paths]
    names: list[str] = []
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def check_recipe(
    folder: Path, wanted: Recipe, held: str, but: frozenset[str] = frozenset()
) -> None:
    """Refuses a folder that "``held`` another recipe"; loggers and ``but`` are left aside."""
    but |= {"loggers"}  # those that were used are not known where the folder has been moved
    there = settings_of(load_recipe(folder / "recipe.yaml"), but=but)
    if others := differences(there, settings_of(wanted, but=but)):
        raise RecipeError(
            f"{folder} {held} another recipe: {', '.join(others)} differ\n"
            "    choose another --output, or remove it"
        )


def _finite_measures(rows: dict[str, dict[str, Any]]) -> dict[str, Measures]:
    """Keeps the numbers of an evaluation's rows; None where not defined or not finite."""
    return {
        name: {
            key: value if value is None or abs(value) < LARGEST_NUMBER else None
            for key, value in row.items()
            if value is None or isinstance(value, (int, float))
        }
        for name, row in rows.items()
    }


def read_run(path: str | Path) -> Run:
    """Reads a run's folder.

    Raises:
        DataError: it is not a run's folder, or one of its files is broken; names the file.
    """
    path = Path(path)
    if not os.path.isfile(path / "recipe.yaml"):  # False for names that no system takes, too
        raise no_run(path)
    try:
        recipe = read_yaml(path / "recipe.yaml", "recipe")
    except RecipeError as error:
        raise DataError(str(error)) from error
    evaluation = read_evaluation(path / "evaluation" / "metrics.json")
    needed = [
        f"{kind}_{name}"
        for name in evaluation.get("parameters", ())
        for kind in ("true", "predicted")
    ]
    predicted = predicted_path(path)
    steps, stride = _read_thinly(path / "steps.csv", NEEDED_OF_STEPS)
    epochs = read_table(path / "epochs.csv", NEEDED_OF_EPOCHS)
    return Run(
        path=path,
        recipe=recipe,
        steps=_latest_rows(steps, path / "steps.csv", "step", "epoch"),
        stride=stride,
        epochs=_latest_rows(epochs, path / "epochs.csv", "epoch"),
        predictions=read_table(path / "evaluation" / "predictions.csv", needed),
        evaluation=evaluation,
        profiles=read_profiles(path),
        predicted=read_profile(predicted) if predicted.exists() else None,
        layers=read_layers(path / LAYERS),
    )


def read_evaluation(path: Path) -> dict[str, Any]:
    """Reads what an evaluation measured; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    found = value if isinstance(value, dict) else {}
    rows = found.get("parameters", found.get("classes"))
    named = rows.values() if isinstance(rows, dict) else ()
    if not named or not all(isinstance(row, dict) for row in named):
        raise DataError(f"{path} holds no errors of parameters and no scores of classes")
    return found


def evaluated_split(evaluation: dict[str, Any]) -> str:
    """Names the split that an evaluation measured; those of other programs are of the test's."""
    return str(evaluation.get("split", TEST))


def check_measured_test(folder: Path, evaluation: dict[str, Any]) -> None:
    """Refuses an evaluation of another split than the test's, of which a page says that it is."""
    if (split := evaluated_split(evaluation)) != TEST:
        raise DataError(
            f"{folder} measured the {split} split, and this page compares the test split\n"
            f"    hyperslab evaluate {quote(str(folder.parent))}"
        )


def read_table(path: Path, columns: Sequence[str]) -> Columns:
    """Reads a CSV file's columns of numbers; empty where there is no such file.

    An empty cell is NaN, and so is one beyond `LARGEST_NUMBER`. A last line without its line end
    is still being written, and is left out. `TEXT_COLUMNS` are no numbers and are left out too.

    Raises:
        DataError: a column is missing, a row is too short or long, or a cell is not a number.
    """
    if not path.exists():
        return {}
    rows = _rows(path, columns)
    header = next(rows)
    places = {name: i for i, name in enumerate(header) if name not in TEXT_COLUMNS}
    found = {name: array("d") for name in places}
    for line, row in enumerate(rows, start=2):
        if line * len(places) > MOST_CELLS:
            raise DataError(f"{path} has more than {MOST_CELLS} cells, which are read at most")
        for name, i in places.items():
            found[name].append(_number(row[i], path, line, name))
    return {name: np.asarray(column) for name, column in found.items()}


def _read_thinly(path: Path, columns: Sequence[str]) -> tuple[Columns, int]:
    """Reads a table as `read_table`; of a long one each ``stride``-th row and the last, and that.

    It holds at most `MOST_THIN_CELLS`, as what `_thinned` leaves.
    """
    if not path.exists():
        return {}, 1
    rows = _rows(path, columns)
    header = next(rows)
    numbers = (
        array("d", map(_number, row, itertools.repeat(path), itertools.repeat(line), header))
        for line, row in enumerate(rows, start=2)
    )
    kept, stride = _thinned(numbers, MOST_THIN_CELLS // len(header))
    table = np.array(kept).reshape(len(kept), len(header))
    return dict(zip(header, table.T, strict=True)), stride


def _thinned(items: Iterable[T], most: int) -> tuple[list[T], int]:
    """Keeps each ``stride``-th item and the last, and returns that stride.

    It is the lowest power of two that leaves at most so many besides the last.
    """
    kept: list[T] = []
    stride = 1
    last: T | None = None
    for number, last in enumerate(items):
        if number % stride == 0:
            kept.append(last)
        if len(kept) > most:
            del kept[1::2]
            stride *= 2
    if last is not None and last is not kept[-1]:
        kept.append(last)
    return kept, stride


def read_layers(path: Path) -> dict[int, LayerColumns]:
    """Reads what layers said by step: of the first, the last, and evenly spaced ones between.

    Raises:
        DataError: as `read_table`, or a step has more rows than a network has layers.
    """
    if not path.exists():
        return {}
    rows = _rows(path, LAYER_COLUMNS)
    header = next(rows)
    place = header.index("step")
    numbers = [name for name in header if name not in ("step", "layer", "use")]

    def by_step() -> Iterator[tuple[int, LayerColumns]]:
        lines = enumerate(rows, start=2)
        for step, group in itertools.groupby(lines, lambda line: line[1][place]):
            found: LayerColumns = {}
            for line, row in group:
                cells = dict(zip(header, row, strict=True))
                use = "" if cells["use"] == "1" else f" ({cells['use']})"
                values = {key: _number(cells[key], path, line, key) for key in numbers}
                found[f"{cells['layer']}{use}"] = values
                if len(found) > MOST_LAYERS:
                    raise DataError(f"{path} has more than {MOST_LAYERS} layers in step {step}")
            if math.isnan(number := _number(step, path, line, "step")):
                place_of = f"{path}, line {line}, column step"
                raise DataError(f"{place_of}: {step!r} is not the number of one")
            yield round(number), found

    return dict(_thinned(by_step(), MOST_LAYER_STEPS)[0])


def read_words(path: Path, column: str) -> tuple[str, ...]:
    """Reads a column of text in the rows that `read_table` reads; raises as that."""
    rows = _rows(path, [column])
    place = next(rows).index(column)
    found: list[str] = []
    size = 0
    for row in rows:
        found.append(row[place])
        size += sys.getsizeof(row[place])
        if size > MOST_WORDS:
            raise DataError(f"{path} has more than {MOST_WORDS >> 20} MiB of words in {column!r}")
    return tuple(found)


LARGEST_NUMBER = 1e100  # no axis ends at infinity, and the ticks of one near it overflow
MOST_CELLS = 1 << 25  # the most numbers of a run's table that are read, 256 MiB of them
MOST_THIN_CELLS = 1 << 19  # numbers of the steps' table that a report keeps, of some 50,000 rows
MOST_LAYERS = 1 << 14  # uses of layers in a step
MOST_LAYER_STEPS = 16  # steps whose layers a report keeps
MOST_WORDS = 256 << 20  # the most that a column of text of a run's table may take [B]
MOST_ROW = 1 << 20  # the longest line of a run's table [B]


def _rows(path: Path, columns: Sequence[str]) -> Iterator[list[str]]:
    """Yields the header and then each finished row, of as many cells."""
    try:
        with open_plain(path) as file:
            rows = csv.reader(line.decode() for line in finished_lines(file, MOST_ROW))
            header = next(rows, [])
            if missing := [name for name in columns if name not in header]:
                raise DataError(
                    f"{path} has no column {', '.join(missing)}; it has: {', '.join(header)}"
                )
            yield header
            for line, row in enumerate(rows, start=2):
                if len(row) != len(header):
                    raise DataError(
                        f"{path}, line {line}: {len(row)} cells instead of {len(header)}"
                    )
                yield row
    except DataError:
        raise
    except (OSError, csv.Error, ValueError) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from error


def _number(cell: str, path: Path, line: int, name: str) -> float:
    try:
        value = float(cell or "nan")
        return value if abs(value) < LARGEST_NUMBER else float("nan")
    except ValueError:
        raise DataError(f"{path}, line {line}, column {name}: {cell!r} is not a number") from None


def _latest_rows(table: Columns, path: Path, key: str, *others: str) -> Columns:
    """Keeps one row per key, in order; a resumed run may have written some steps twice.

    Raises:
        DataError: what counts, the key or one of the ``others``, is no whole number from 0 on.
    """
    if not table or not len(table[key]):
        return {}
    for name in (key, *others):
        column = table[name]
        if odd := column[~((column >= 0) & (column < 2**53) & (column % 1 == 0))].tolist():
            raise DataError(f"{path}, column {name}: {odd[0]:g} is not a whole number from 0 on")
    # Backwards, so that the row that was written last is the first of its key.
    keys = table[key][::-1]
    _, first = np.unique(keys, return_index=True)
    return {name: column[::-1][first] for name, column in table.items()}
