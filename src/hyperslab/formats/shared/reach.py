"""`Reach`: how far a data set's files may refer to other files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hyperslab.errors import DataError

ALLOW = (
    "if you trust it, allow it: data.outside_files=true in a recipe, --outside-files, or "
    "hyperslab.open(..., outside_files=True)"
)

ALLOW_MISSING = (
    "if what is not there is meant to be so, allow it: data.missing_chunks=true in a recipe, "
    "--missing-chunks, or hyperslab.open(..., missing_chunks=True)"
)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What files may do because the user says so.

    ``outside_files``: take values from files outside of the folder. ``missing_chunks``: lack what
    is not stored, which is then read as the fill value: many programs leave out chunks of zeros.
    """

    outside_files: bool = False
    missing_chunks: bool = False


STRICT = Allowed()


@dataclass(frozen=True, slots=True)
class Reach:
    """Files may name others that lie in ``folder``, the data path; or as it is ``allowed``.

    What a file says is whoever's who wrote it, and could have any file that this user can read
    taken for a volume. Links of the file system that lie in the folder itself are followed: they
    are its owner's, and data sets are often put together of them.
    """

    folder: Path
    allowed: Allowed = STRICT

    def check(self, path: Path, what: str, target: Path) -> None:
        """Nothing, if the file ``path`` may refer to ``target``; ``what`` of it does.

        Raises:
            DataError: it may not, or there is no such file.
        """
        real = Path(os.path.realpath(target))
        inside = real.is_relative_to(os.path.realpath(self.folder))
        if not inside and not self.allowed.outside_files:
            raise DataError(
                f"{path}: {what} refers to {real}, which is not in the folder {self.folder}\n"
                f"    {ALLOW}"
            )
        if not real.is_file():
            raise DataError(
                f"{path}: {what} refers to {target}, which is no file, and would be read as "
                "zeros\n    put it back"
            )
