"""docs/benchmarks.md has the table that the records make (tier: no process)."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
WRITER = runpy.run_path(str(ROOT / "benchmarks" / "networks_table.py"))


def test_the_page_has_the_table_of_the_newest_records() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert page == WRITER["page"](), "run python benchmarks/networks_table.py"


def test_every_record_of_networks_is_in_the_table() -> None:
    named = {f"networks-{name}.json" for names in WRITER["RECORDS"].values() for name in names}
    assert named == {path.name for path in (ROOT / "benchmarks/results").glob("networks-*.json")}
