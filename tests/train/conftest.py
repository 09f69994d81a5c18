from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.universes import write_universes


@pytest.fixture(scope="session")
def universes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 universes of 16^3 voxels."""
    return write_universes(tmp_path_factory.mktemp("data") / "universes", 13)
