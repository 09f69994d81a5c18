from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import NodesError
from tests.slurm.cluster import SlurmCluster, missing_tools

WANTED = "HYPERSLAB_TEST_SLURM"
"""`make test-slurm` sets it: what is missing is then a failure."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """The one of all tests."""
    if WANTED not in os.environ:
        pytest.skip("`make test-slurm` starts Slurm for them")
    missing = missing_tools()
    assert not missing, f"Slurm is not installed: {', '.join(missing)}"
    try:
        cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    except NodesError as reason:
        pytest.fail(str(reason))
    with cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test's runs and logs are."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path
