"""Modules of users that register formats."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from hyperslab.errors import DataError


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules by name; they are looked for in the current folder too.

    Raises:
        DataError: one cannot be imported; says why.
    """
    if modules:
        look_in_current_folder()
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # whatever is wrong in somebody else's code
            raise DataError(
                f"plugin {module!r}: cannot be imported: {type(error).__name__}: {error}\n"
                "    give the name of a module that is installed, in PYTHONPATH or in this folder"
            ) from error


def look_in_current_folder() -> None:
    """As `python -m` does; the command `hyperslab` does not."""
    with suppress(FileNotFoundError):  # the folder is gone: nothing is to be found there
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)
