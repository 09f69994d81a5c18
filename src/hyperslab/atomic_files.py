"""Files of results: each is there whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def as_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def as_json(value: Any) -> str:
    """A value as text; what is not a finite number is null, for JSON has no other."""
    return json.dumps(_defined(value), indent=1) + "\n"


def replace(path: Path, text: str) -> None:
    """Write a file in the place of what is there."""
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _defined(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _defined(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
