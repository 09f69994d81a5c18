"""The files of ``formats/`` that the request for one box passes (tier: no process)."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hyperslab as hs
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.universes import Seat
from tests.formats.writers import FORMATS

FOLDER = Path(hs.formats.__file__).parent


def file_of(frame: FrameType) -> str | None:
    """The file of ``formats/`` in which a call runs."""
    file = Path(frame.f_code.co_filename)
    return file.relative_to(FOLDER).as_posix() if file.is_relative_to(FOLDER) else None


KINDS = [name for name in FORMATS if not name.startswith(("TFRecord", "NIfTI"))]
"""Those whose files need not be parsed, field by field, to find the voxels."""


@pytest.mark.parametrize("name", KINDS)
def test_no_file_is_entered_more_than_twice(tmp_path: Path, name: str) -> None:
    """Calls from one file into another: open, source, file; what was left is entered once more."""
    FORMATS[name](tmp_path)
    source = source_of(tmp_path, Seat())
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_lasti > 4):
            return  # the way back through a `with`
        file = file_of(frame)
        above = frame.f_back
        while above is not None and file_of(above) is None:
            above = above.f_back
        if file is not None and (above is None or file_of(above) != file):
            entered.append(file)

    sys.setprofile(note)
    try:
        source.read(0, Box((0, 0, 0, 0), (1, 2, 2, 2)))
    finally:
        sys.setprofile(None)
    assert len(entered) >= 3
    # What stands in Zarr's own place is opened, asked for an array, and for the box.
    most = {"arrays/zarr_bounded.py": 3}
    often = {file for file in entered if entered.count(file) > most.get(file, 2)}
    assert often == set(), entered
