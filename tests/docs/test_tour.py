"""The tour names files that exist, each of them once (tier: no process)."""

from __future__ import annotations

import re
from collections import Counter

from tests.docs.blocks import DOCS

SOURCE = DOCS.parent / "src" / "hyperslab"
TOUR = (DOCS / "tour.md").read_text()
NAMED = re.findall(r"`((?!tests/|src/)[\w./]+(?:\.py|/))`", TOUR)


def test_what_it_names_exists() -> None:
    assert len(NAMED) > 50
    assert [name for name in NAMED if not (SOURCE / name).exists()] == []


def test_no_file_is_named_twice() -> None:
    files = Counter(name for name in NAMED if name.endswith(".py"))
    assert [name for name, times in files.items() if times > 1] == []


def test_it_passes_every_package() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages - {name.split("/")[0] for name in NAMED} == set()
