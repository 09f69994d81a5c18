"""The plain C beside the intrinsics gives the same (tier: no process; compiles once)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest
from hypothesis import given, settings

from hyperslab.kernels import compile as cache
from hyperslab.kernels import compile as compiler
from hyperslab.kernels import epilogue, normalization, reorder
from hyperslab.kernels.compile import CannotCompile, Compiler, load_library
from tests.kernels.epilogue.cases import (
    Case,
    cases,
    check_chain,
    check_channel_sums,
    check_numbers,
    check_reorder,
)

WITHOUT_INTRINSICS = "-U__AVX512F__"


@pytest.fixture(scope="module", autouse=True)
def _portable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The operators run what was compiled as for a processor without wide registers."""
    try:
        found = compiler.find_compiler()
    except CannotCompile:
        pytest.skip("no compiler")
    path = tmp_path_factory.mktemp("portable") / "kernels.so"
    plain = Compiler((*found.command, WITHOUT_INTRINSICS), found.version)
    plain.compile(sorted(cache.SOURCES.glob("*.c")), path)
    functions = load_library(path)
    with ExitStack() as stack:
        for module in (epilogue, normalization, epilogue, reorder):
            stack.enter_context(patch.object(module, "library", lambda: functions))
        yield


@settings(max_examples=60, deadline=None)
@given(cases())
def test_all_operators(case: Case) -> None:
    check_chain(case)
    check_channel_sums(case)
    check_numbers(1 + case.seed % 3, case.shape[1], 1 + case.seed % 4, case.seed)
    check_reorder(case)
