"""Errors as a user of the command line sees them: one clean message, no traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from hyperslab.errors import HyperslabError

DEBUG = "HYPERSLAB_DEBUG"
"""Set to anything in the environment, it asks for tracebacks; rank processes inherit it."""


@contextmanager
def clean_errors() -> Iterator[None]:
    """Print a HyperslabError as `error: ...` in red and exit with 1; in debug mode let it pass.

    Every process that runs a command does so inside this, a rank too.
    """
    try:
        yield
    except HyperslabError as error:
        if os.environ.get(DEBUG):
            raise
        console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        console.print(f"error: {error}", style="red")
        raise SystemExit(1) from None
