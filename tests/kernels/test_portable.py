"""The plain C beside the intrinsics gives the same (tier: no process; may compile)."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given, settings

from hyperslab.kernels import registry
from hyperslab.kernels.compile import CannotCompile, load_library
from tests.kernels.compiled import WITHOUT_WIDE_REGISTERS, compiled
from tests.kernels.epilogue.cases import (
    Case,
    cases,
    check_chain,
    check_channel_sums,
    check_numbers,
    check_reorder,
)


@pytest.fixture(scope="module", autouse=True)
def _portable() -> Iterator[None]:
    """The operators run what was compiled as for a processor without wide registers."""
    try:
        functions = load_library(compiled(WITHOUT_WIDE_REGISTERS))
    except CannotCompile:
        pytest.skip("no compiler")
    with patch.object(registry, "library", lambda: functions):
        yield


@settings(max_examples=60, deadline=None)
@given(cases())
def test_all_operators(case: Case) -> None:
    check_chain(case)
    check_channel_sums(case)
    check_numbers(1 + case.seed % 3, case.shape[1], 1 + case.seed % 4, case.seed)
    check_reorder(case)
