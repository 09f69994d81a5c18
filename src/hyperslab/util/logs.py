"""Prints the logs of a command, or of a program that has said nothing of logs."""

from __future__ import annotations

import logging
import os
import sys

from hyperslab.errors import printable


class StdoutHandler(logging.Handler):
    """Prints messages to what is standard output now, control characters written out.

    A progress bar may have put itself in front of it. A reader that has gone, such as `head`, does
    not end the training, and no more does a full disk, where the messages would go. A message that
    follows itself, as of data that each run of a sweep opens, is printed once; warnings always are.
    """

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(self.format(record))
        if text == self.last and record.levelno < logging.WARNING:
            return
        try:
            print(text, file=sys.stdout, flush=True)
            self.last = text
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        except OSError:
            return


def show_logs(*, is_main: bool) -> None:
    """Print hyperslab's logs, set up once in a process; ranks but the main one warn only.

    A rank that a study has forked may have the study's handler, for the logs of all libraries.
    """
    log = logging.getLogger("hyperslab")
    handlers = (*log.handlers, *log.root.handlers)
    if not any(isinstance(handler, StdoutHandler) for handler in handlers):
        log.addHandler(StdoutHandler())
    log.setLevel(logging.INFO if is_main else logging.WARNING)
