from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import close_pool


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    """No worker outlives the session."""
    yield
    close_pool()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
