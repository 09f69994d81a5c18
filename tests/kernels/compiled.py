"""Compiles all kernels once for each set of flags, for the tests that look at what was compiled."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from hyperslab.kernels import registry
from hyperslab.kernels.built_in import processor_flags
from hyperslab.kernels.compile import (
    CannotCompile,
    Library,
    cached_library,
    find_compiler,
    library,
    load_library,
)

WITHOUT_WIDE_REGISTERS = "-U__AVX512F__"
HAS_WIDE_REGISTERS = "avx512f" in processor_flags()
BOTH_WIDTHS = ["this processor's", *[WITHOUT_WIDE_REGISTERS] * HAS_WIDE_REGISTERS]


def compiled(*flags: str) -> Path:
    """The library as the compiler makes it with these flags, kept where hyperslab keeps its own.

    So all sessions share it, and it is compiled again only after its sources have changed. What
    says that there are no wide registers changes nothing where there are none.

    Raises:
        CannotCompile: there is no compiler.
    """
    if flags == (WITHOUT_WIDE_REGISTERS,) and not HAS_WIDE_REGISTERS:
        flags = ()
    command = shlex.join([*find_compiler().command, *flags])
    with patch.dict(os.environ, CC=command):
        return cached_library()


@contextmanager
def library_of(width: str, known: str) -> Iterator[Library | None]:
    """The library as it is, or as for a processor without AVX-512, where it has ``known``."""
    if width == BOTH_WIDTHS[0]:
        yield library()
        return
    try:
        narrow = load_library(compiled(width))
    except CannotCompile:
        pytest.skip("no compiler")
    if not getattr(narrow, known):
        pytest.skip("no AVX2")
    with patch.object(registry, "library", lambda: narrow):
        yield narrow
