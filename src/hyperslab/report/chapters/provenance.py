"""The chapter on the run itself: what was run, on what, by which recipe."""

from __future__ import annotations

import yaml

from hyperslab.report.chapters.overview import facts_of
from hyperslab.report.page import html
from hyperslab.report.page.html import Chapter
from hyperslab.report.run_folder import Run


def provenance(run: Run) -> Chapter:
    """What was run, on what, and the whole recipe."""
    recipe = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
    body = html.facts(facts_of(run)) + html.details("The whole recipe", recipe)
    return Chapter("run", "The run", body)
