"""The chapter on the run itself: what was run, on what, by which recipe."""

from __future__ import annotations

import yaml

from hyperslab.report.chapters.overview import facts_of
from hyperslab.report.page.blocks import Chapter, Details, FactList
from hyperslab.report.run_folder import Run


def provenance(run: Run) -> Chapter:
    """What was run, on what, and the whole recipe."""
    recipe = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
    blocks = (FactList(facts_of(run)), Details("The whole recipe", recipe))
    return Chapter("run", "The run", blocks)
