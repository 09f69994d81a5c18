"""The chapter on the run itself: what was run, on what, by which recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from hyperslab.atomic_files import read_json_lines
from hyperslab.errors import DataError
from hyperslab.report.chapters.overview import facts_of
from hyperslab.report.number_format import DASH
from hyperslab.report.page.blocks import Block, CellTable, Chapter, Details, FactList, TableRow
from hyperslab.report.run_folder import Run
from hyperslab.train.history import CHANGES


def provenance(run: Run) -> Chapter:
    """What was run, on what, and the whole recipe."""
    recipe = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
    blocks: list[Block] = [FactList(facts_of(run)), *_changes(run)]
    return Chapter("run", "The run", [*blocks, Details("The whole recipe", recipe)])


def _changes(run: Run) -> list[Block]:
    """What the recipe, which is that of the last steps, was before the run was resumed."""
    path = run.path / CHANGES
    if not path.exists():
        return []
    rows = list(_rows(path))
    caption = "What was changed when the run was resumed; the recipe is that of the last steps"
    head = ["key", "before", "from then on", "after step", "date [UTC]"]
    return [CellTable(caption, head, rows)] if rows else []


def _rows(path: Path) -> Iterator[TableRow]:
    """One for each key that was changed.

    Raises:
        DataError: it is no such file.
    """
    try:
        found, _ = read_json_lines(path)
        for one in found:
            date = str(one["date"])[:16].replace("T", " ")
            for key, (before, now) in one["changes"].items():
                yield [str(key), _words(before), _words(now), str(one["step"]), date]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} holds no changes of a recipe: {error!r}") from None


def _words(value: object) -> str:
    return DASH if value is None else str(value)
