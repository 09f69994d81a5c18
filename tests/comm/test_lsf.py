"""The place of a rank that LSF's jsrun started (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperslab.comm.launchers import adopt_launcher, adopt_lsf
from hyperslab.errors import HyperslabError

JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "LSB_JOBID": "123456",
    "LSB_HOSTS": "batch4 lassen7 lassen7 lassen8 lassen8",
    # Spectrum MPI's own, which would ask for mpi4py
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}

PLACE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "lassen7",
    "MASTER_PORT": "23456",
    "HYPERSLAB_RUN": "LSF job 123456",
}


def added(environ: dict[str, str]) -> dict[str, str]:
    after = dict(environ)
    adopt_launcher(after)
    assert environ.items() <= after.items()
    return {name: after[name] for name in after.keys() - environ.keys()}


def test_lsfs_variables_become_torchruns() -> None:
    assert added(JSRUN) == PLACE


def test_the_file_of_ranks_is_asked_first(tmp_path: Path) -> None:
    """LSB_HOSTS is not set where it would be too long."""
    file = tmp_path / "ranks"
    file.write_text("batch4\n" + "".join(f"lassen{n // 4}\n" for n in range(36, 8000)))
    environ = JSRUN | {"LSB_DJOB_RANKFILE": str(file)}
    assert added(environ) == PLACE | {"MASTER_ADDR": "lassen9"}


@pytest.mark.parametrize("hosts", ["lassen7", "lassen7 lassen7"])
def test_a_job_on_one_machine(hosts: str) -> None:
    assert added(JSRUN | {"LSB_HOSTS": hosts}) == PLACE


def test_what_the_user_says_is_left() -> None:
    own = {"MASTER_ADDR": "ib7", "MASTER_PORT": "29500"}
    found = added(JSRUN | own)
    assert found == {k: v for k, v in PLACE.items() if k not in own}


@pytest.mark.parametrize(
    "changed", [{"RANK": "0"}, {"JSM_NAMESPACE_SIZE": "1"}], ids=["a place", "one task"]
)
def test_what_is_no_rank_of_jsrun(changed: dict[str, str]) -> None:
    environ = JSRUN | changed
    adopt_lsf(environ)
    assert environ == JSRUN | changed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"JSM_NAMESPACE_RANK": None}, "JSM_NAMESPACE_RANK is not set, but LSB_JOBID=123456 is"),
        ({"JSM_NAMESPACE_SIZE": "x"}, "JSM_NAMESPACE_SIZE='x' is not a whole number"),
        ({"LSB_JOBID": None}, "LSB_JOBID is not set"),
        ({"LSB_HOSTS": " "}, "LSB_HOSTS is not set"),
        ({"LSB_DJOB_RANKFILE": "/no/file"}, "LSB_DJOB_RANKFILE='/no/file' cannot be read"),
    ],
    ids=str,
)
def test_odd_variables_are_named(changed: dict[str, str | None], words: str) -> None:
    environ = {k: v for k, v in (JSRUN | changed).items() if v is not None}
    with pytest.raises(HyperslabError, match=f"^{words}"):
        adopt_lsf(environ)


def test_an_empty_file_of_ranks_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ranks"
    file.touch()
    with pytest.raises(HyperslabError, match=r"LSB_DJOB_RANKFILE=.* names no machine"):
        adopt_lsf(JSRUN | {"LSB_DJOB_RANKFILE": str(file)})
