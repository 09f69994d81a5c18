"""Compiles all kernels once for each set of flags, for the tests that look at what was compiled."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from unittest.mock import patch

from hyperslab.kernels.compile import cached_library, find_compiler

WITHOUT_WIDE_REGISTERS = "-U__AVX512F__"


def compiled(*flags: str) -> Path:
    """The library as the compiler makes it with these flags, kept where hyperslab keeps its own.

    So all sessions share it, and it is compiled again only after its sources have changed.

    Raises:
        CannotCompile: there is no compiler.
    """
    command = shlex.join([*find_compiler().command, *flags])
    with patch.dict(os.environ, CC=command):
        return cached_library()
