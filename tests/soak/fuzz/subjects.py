"""All kinds that are mutated, by name."""

from __future__ import annotations

from tests.soak.fuzz.files import FILES
from tests.soak.fuzz.records import RECORDS
from tests.soak.fuzz.subject import Subject

SUBJECTS: dict[str, Subject] = FILES | RECORDS
