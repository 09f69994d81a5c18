"""Runs `hyperslab compile`: compiles the kernels where the installation has none."""

from __future__ import annotations

from hyperslab.cli.terminal import say
from hyperslab.util.logs import show_logs


def compile_command() -> None:
    """Compile the kernels for this processor.

    A machine needs this once, and only if the package was installed without a C compiler. Until
    then runs use torch's slower operators and say so. HYPERSLAB_COMPILE=1 in the environment
    compiles even if the package has kernels.
    """
    from hyperslab.kernels.compile import load_library, ready_library

    show_logs(is_main=True)
    path = ready_library(compiled=True)
    load_library(path)
    say(f"kernels for this processor: {path}")
