"""Shows a user of the command line errors, interrupts, log lines and progress.

Errors are one clean message, Ctrl-C is one line and exit code 130, and whatever is printed has
its control characters written out.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

import typer

from hyperslab.errors import HyperslabError, printable, reason
from hyperslab.util.logs import StdoutHandler
from hyperslab.util.signals import StopRequest
from hyperslab.util.startup import FOLDER_GONE, is_command, say_stopped

if TYPE_CHECKING:  # slow to import, and not for every command
    from rich.progress import Progress

DEBUG = "HYPERSLAB_DEBUG"
"""Set to anything in the environment, it asks for tracebacks; rank processes inherit it."""

NO_MEMORY = re.compile(
    r"can't allocate memory: you tried to allocate \d+ bytes|Storage size calculation overflowed.*"
)
"""Matches torch's errors of memory of the host that there is not, or cannot be."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Says that a disk, a quota or a file is full, such as the one that standard output goes to."""

INTERRUPT_AGAIN = 0.01
"""[s] After that an interrupt which was ignored comes again: at another place, by then."""


@contextmanager
def clean_errors() -> Iterator[None]:
    """Print a HyperslabError as `error: ...` in red and exit with 1; in debug mode let it pass.

    It also says in words that there is no memory, no room on a disk, no current folder any more, or
    that a file cannot have a name: it is too long, or the locale has not all of its letters. Every
    process that runs a command does so inside this, a rank too.
    """
    try:
        yield
    except (HyperslabError, MemoryError, OSError, RuntimeError, UnicodeEncodeError) as error:
        words = _words_of(error)
        if os.environ.get(DEBUG) or not words:
            raise
        # As soon as one rank has failed, torchrun ends the others; their words come first.
        with StopRequest().listening():
            colour = None if os.environ.get("NO_COLOR") else "red"
            typer.secho(f"error: {printable(words)}", fg=colour, err=True)
        raise SystemExit(1) from None


def _words_of(error: Exception) -> str:
    """Say what ended a command; nothing where the traceback has to."""
    if isinstance(error, HyperslabError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"out of memory: {error}"
    if isinstance(error, RuntimeError) and (asked := NO_MEMORY.search(str(error))):
        return f"out of memory: {asked[0]}"
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, *NO_ROOM):
        return reason(error)
    # Names have all letters in UTF-8; what it cannot encode is half of one, from anywhere.
    encoding = sys.getfilesystemencoding()
    if isinstance(error, UnicodeEncodeError) and error.encoding == encoding != "utf-8":
        return (
            f"{error.object} cannot be the name of a file in this locale, whose encoding is "
            f"{error.encoding}\n    set PYTHONUTF8=1 in the environment, or LC_ALL=C.UTF-8"
        )
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return FOLDER_GONE
    return ""


@contextmanager
def clean_interrupts() -> Iterator[None]:
    """Turn Ctrl-C into one line and exit code 130; in debug mode into a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        if os.environ.get(DEBUG):
            raise
        if is_command():  # it ends already, and one more must change nothing of how
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        say_stopped(signal.SIGINT)
        raise SystemExit(128 + signal.SIGINT) from None


def begin_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from here on, as in any program; before it was imports."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = _keep_interrupt


def _keep_interrupt(ignored: sys.UnraisableHookArgs) -> None:
    """Send an interrupt anew that came where Python ignores all errors, and say the other ones.

    Such places are callbacks of weak references and `__del__`: the command would go on.
    """
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        again = threading.Timer(INTERRUPT_AGAIN, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(ignored)


def leave_rank(end: BaseException) -> NoReturn:
    """End a rank with the words and the exit code that ``end`` would have, at once.

    The interpreter does not shut down: worker threads of gloo sometimes abort the process while
    it does, which would turn a run that went well into one that was killed.
    """
    code = _exit_code(end)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    if code == 0:
        from hyperslab.comm.launchers import finish_mpi

        finish_mpi()
    os._exit(code)


def _exit_code(end: BaseException) -> int:
    if isinstance(end, SystemExit):
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(printable(str(end.code)), file=sys.stderr)
        return 1
    sys.excepthook(type(end), end, end.__traceback__)
    return 128 + signal.SIGINT if isinstance(end, KeyboardInterrupt) else 1


def log_to_stdout(level: int) -> None:
    """Have the logs of this process printed, from a level on."""
    logging.basicConfig(format="%(message)s", handlers=[StdoutHandler()], level=level)


def say(text: str, *, err: bool = False) -> None:
    """Print a line, or several; ``err``: to standard error."""
    typer.echo(printable(text), err=err)


@contextmanager
def counting(what: str, total: int | None) -> Iterator[Callable[[object], None]]:
    """Show how many of ``total`` are done: one more with each call of what this gives."""
    with progress() as bar:
        task = bar.add_task(what, total=total)
        yield lambda _: bar.advance(task)


def progress(*, is_main: bool | None = None) -> Progress:
    """Show a bar on the terminal, by default on standard error; nothing where that is a file.

    The error output of ranks goes to files: the main one shows it on its standard output.
    """
    from rich import progress as shown
    from rich.console import Console

    console = Console(stderr=is_main is None)
    return shown.Progress(
        shown.TextColumn("{task.description}"),
        shown.BarColumn(),
        shown.MofNCompleteColumn(),
        shown.TimeRemainingColumn(),
        console=console,
        disable=is_main is False or not console.is_terminal,
    )
