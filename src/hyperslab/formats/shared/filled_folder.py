"""A folder of volumes that one process fills at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperslab.atomic_files import try_lock
from hyperslab.errors import DataError, reason


@contextmanager
def filling(folder: Path, what: str) -> Iterator[None]:
    """Keep others out of a folder meanwhile; the system lets go when the process ends.

    The folder itself is locked: it holds volumes and nothing else.

    Raises:
        DataError: another process fills it, ``what`` says how; or it cannot be opened.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DataError(f"cannot open the folder {folder}: {reason(error)}") from error
    try:
        if not try_lock(descriptor):
            raise DataError(
                f"{folder}: another {what} into it is under way\n"
                "    wait for its end, or choose another folder"
            )
        yield
    finally:
        os.close(descriptor)
