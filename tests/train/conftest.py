from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.universes import narrow_network, write_universes


@pytest.fixture(autouse=True)
def _narrow_network() -> Iterator[None]:
    with narrow_network():
        yield


@pytest.fixture(scope="session")
def universes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 universes of 16^3 voxels."""
    return write_universes(tmp_path_factory.mktemp("data") / "universes", 13)
