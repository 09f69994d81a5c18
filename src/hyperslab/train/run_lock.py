"""The lock on a run's folder: one run at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperslab.atomic_files import open_to_append, try_lock
from hyperslab.errors import RecipeError

LOCK_FILE = ".lock"


@contextmanager
def hold(run: Path) -> Iterator[None]:
    """Keep other runs out of a folder that exists; the system lets go when the process ends.

    Raises:
        RecipeError: another process holds it.
        OSError: the folder cannot be written.
    """
    with os.fdopen(open_to_append(run / LOCK_FILE), "a") as file:
        if not try_lock(file.fileno()):
            raise RecipeError(
                f"another run is under way in output {run}\n"
                "    wait for its end, stop it, or choose another --output"
            )
        yield
