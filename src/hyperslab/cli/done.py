"""Remembers that a training is done, so that resuming it says so before torch is imported.

After a training `train` leaves ``done.json`` in the run's folder: the epochs, and what the run held
then. Where all of that is as it was, and the recipe is that of the run, nothing is left to resume.
In every other case the command looks closer, and says the same words.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from hyperslab.util.atomic_files import write_json
from hyperslab.util.documents import read_json

NOTE = "done.json"


def note_done(output: Path, epochs: int) -> None:
    write_json(output / NOTE, _note(output, epochs))


def is_known_done(output: Path, epochs: int) -> bool:
    """Say whether that is noted of a run, which has not been touched since."""
    with suppress(OSError, ValueError):
        return bool(read_json(output / NOTE) == _note(output, epochs))
    return False


def nothing_left(output: Path, epochs: int) -> str:
    return f"all {epochs} epochs of {output} are done: nothing is left to resume"


def _note(output: Path, epochs: int) -> dict[str, Any]:
    """List the recipe and the checkpoints of a run, each with its size [B] and its time [ns]."""
    files = [output / "recipe.yaml", *sorted((output / "checkpoints").rglob("*"))]
    states = [(path, path.stat()) for path in files if not path.is_dir()]
    found = [[str(p.relative_to(output)), s.st_size, s.st_mtime_ns] for p, s in states]
    return {"epochs": epochs, "run": found}
