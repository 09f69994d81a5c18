"""Runs `hyperslab compile`: compiles the kernels before the first run would."""

from __future__ import annotations

from hyperslab.cli.terminal import say
from hyperslab.kernels.compile import load_library, ready_library
from hyperslab.util.logs import show_logs


def compile_command() -> None:
    """Compile the kernels for this processor.

    Otherwise the first run does so, unless they came with the package. HYPERSLAB_COMPILE=1 in the
    environment compiles them in any case.
    """
    show_logs(is_main=True)  # it takes seconds
    path = ready_library()
    load_library(path)
    say(f"kernels for this processor: {path}")
