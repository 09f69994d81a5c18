"""The bar that a command shows while it works."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress(console: Console | None = None) -> Progress:
    """A bar on the terminal, by default on standard error; nothing where that goes to a file."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet or not console.is_terminal,
    )
