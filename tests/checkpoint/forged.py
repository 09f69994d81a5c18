"""Manifests that say that all is as written, and pickles that attack who reads them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any


def write_sums(path: Path, **more: object) -> None:
    """A manifest that says that all is as written."""
    files = [file for file in sorted(path.iterdir()) if file.name != "manifest.json"]
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (path / "manifest.json").write_text(json.dumps({**more, "sha256": sums}))


class Attack:
    """A pickle that makes a folder when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.mark), 0o777, True)


def attacking_pickle(mark: Path) -> bytes:
    return pickle.dumps(Attack(mark))
