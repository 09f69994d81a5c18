"""Runs of classes compared on one page (tier: one process)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hyperslab.errors import DataError
from hyperslab.studies.configurations import ClassComparison, read_compared
from hyperslab.studies.report import write_comparison, write_report
from hyperslab.studies.report.comparison import class_chapter
from hyperslab.studies.report.html import Chapter
from hyperslab.studies.table import Table
from tests.train.scans import write_recipe

CLASSES = ("background", "organ", "lesion")


def run(folder: Path, name: str, seed: int, dice: list[float]) -> Path:
    """The folder of a run that is evaluated."""
    recipe = yaml.safe_load(write_recipe(folder / f"{name}.yaml", folder, seed=seed).read_text())
    path = folder / name
    (path / "evaluation").mkdir(parents=True)
    recipe["model"]["channels"] = 4 if name.startswith("wide") else 2
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    scores = {n: {"dice": d} for n, d in zip(CLASSES, dice, strict=True)}
    content = {"classes": scores, "confusion": [[1] * 3] * 3, "samples": 2, "split": "test"}
    (path / "evaluation" / "metrics.json").write_text(json.dumps(content))
    return path


def class_chapter_of(paths: list[Path]) -> Chapter:
    compared = read_compared(paths)
    assert isinstance(compared, ClassComparison)
    return class_chapter(compared)


def test_dice_by_class_and_seed(tmp_path: Path) -> None:
    paths = [
        run(tmp_path, "narrow-0", 0, [0.9, 0.5, 0.1]),
        run(tmp_path, "narrow-1", 1, [0.8, 0.7, 0.3]),
        run(tmp_path, "wide", 0, [0.9, 0.8, 0.6]),
    ]
    chapter = class_chapter_of(paths)
    table = chapter.blocks[1]
    assert isinstance(table, Table)
    assert list(table.head) == ["configuration", "seeds", "mean", *CLASSES]
    first, second = table.rows
    assert list(first[1:4]) == ["2", "0.400 (0.300 to 0.500)", "0.850 (0.800 to 0.900)"]
    assert list(second[1:]) == ["1", "0.700", "0.900", "0.800", "0.600"]
    assert "Dice by class" in write_comparison(paths).read_text()
    with pytest.raises(DataError, match="these runs give classes"):
        write_comparison(paths, numbers=tmp_path / "n.json")


def test_a_run_with_other_classes(tmp_path: Path) -> None:
    paths = [run(tmp_path, "a", 0, [0.9, 0.5, 0.1]), run(tmp_path, "wide", 0, [0.9, 0.5, 0.1])]
    (paths[1] / "evaluation" / "metrics.json").unlink()
    for order in (paths, paths[::-1]):
        with pytest.raises(DataError, match="wide is not evaluated for the classes background, or"):
            class_chapter_of(order)


def test_runs_with_other_samples(tmp_path: Path) -> None:
    paths = [run(tmp_path, name, seed, [0.9, 0.5, 0.1]) for seed, name in enumerate(("a", "b"))]
    for path, samples in zip(paths, ("u\nv", "v\nu"), strict=True):
        (path / "evaluation" / "samples.csv").write_text(f"sample\n{samples}\n")
    assert class_chapter_of(paths).blocks
    (paths[1] / "evaluation" / "samples.csv").write_text("sample\nu\nw\n")
    with pytest.raises(DataError, match="2 samples, which are not the 2 of"):
        class_chapter_of(paths)
    page = write_report(*paths).read_text()
    assert "Their errors are not compared" in page


def test_runs_that_were_not_measured_on_the_test_split(tmp_path: Path) -> None:
    paths = [run(tmp_path, name, 0, [0.9, 0.5, 0.1]) for name in ("a", "wide")]
    for path in paths:
        file = path / "evaluation" / "metrics.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "split": "train"}))
    with pytest.raises(DataError, match="a/evaluation measured the train split, and this page"):
        class_chapter_of(paths)
