"""Under which name a service knows a run: kept in its folder, for when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hyperslab.atomic_files import write_text

IDENTITIES = "loggers.json"


def run_identity(run: Path, service: str, *, new: bool, make: Callable[[], str]) -> str:
    """The name in the run's folder; a ``new`` run, or one that has none, gets one by ``make``."""
    path = run / IDENTITIES
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    if new or not isinstance(known.get(service), str):
        known[service] = make()
        write_text(path, json.dumps(known))
    return str(known[service])
