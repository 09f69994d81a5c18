"""Small recipes on volumes that no file holds, and what plans of them keep to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hyperslab.planner.job import GridJob, job_of
from hyperslab.planner.machine import Machine, load_machine
from hyperslab.planner.search import PlanBounds
from hyperslab.recipe.load import load_recipe

VALUES: dict[str, Any] = {
    "model": {"width": 16},
    "data": {"synthetic": {"width": 16, "samples": 40}, "batch_size": 4},
}


def recipe_file(folder: Path, **changes: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**VALUES, "output": str(folder / "run"), **changes}))
    return path


def small_job(folder: Path, *overrides: str) -> GridJob:
    return job_of(load_recipe(recipe_file(folder), overrides))


def v100() -> Machine:
    return load_machine("lassen-v100")


def bounds(nbytes: int = 16 << 30, *, everything: bool = False) -> PlanBounds:
    return PlanBounds(nbytes, "a test", everything=everything)
