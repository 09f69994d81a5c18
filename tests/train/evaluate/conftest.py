from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _narrow_network() -> None:
    """These tests build networks by hand, in their own widths."""
