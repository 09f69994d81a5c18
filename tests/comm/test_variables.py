"""What the environment says of a rank, and one error for what it cannot mean (tier: no process)."""

from __future__ import annotations

import pytest

from hyperslab.comm.launchers import RankVariables, check_thread_count, read_variables
from hyperslab.errors import HyperslabError

GOOD = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400",
}


def test_a_rank_and_where_it_meets_the_others() -> None:
    assert read_variables(GOOD) == RankVariables(1, 2, 0, "node7", 29400, None)
    store = {"RANK": "0", "WORLD_SIZE": "2", "HYPERSLAB_STORE": "there"}
    assert read_variables(store) == RankVariables(0, 2, 0, "", 0, "there")
    inherited = {"HYPERSLAB_STORE": "of a rank that started torchrun", "TORCHELASTIC_RUN_ID": "7"}
    assert read_variables(GOOD | inherited) == read_variables(GOOD)


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": "node7"}], ids=str)
def test_one_process_is_no_rank(environ: dict[str, str]) -> None:
    assert read_variables(environ) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not in the range from 1"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set, but RANK=1 is"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set, but RANK=1 is"),
        ({"RANK": None}, "WORLD_SIZE='2' asks for several ranks, but RANK is not set"),
        ({"RANK": None, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ({"RANK": "2"}, "RANK='2' is not in the range from 0 to 1 of WORLD_SIZE=2 ranks"),
        ({"RANK": "-1"}, "RANK='-1' is not in the range from 0 to 1"),
        ({"RANK": "1.0"}, "RANK='1.0' is not a whole number"),
        ({"RANK": ""}, "RANK is not set"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x' is not a whole number"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not in the range"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK='2' is not in the range from 0 to 1"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT='0' is not in the range from 1 to 65535"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000' is not in the range from 1 to 65535"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set, but RANK=1 is"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(changed: dict[str, str | None], words: str) -> None:
    environ = {k: v for k, v in (GOOD | changed).items() if v is not None}
    with pytest.raises(HyperslabError) as caught:
        read_variables(environ)
    assert str(caught.value).startswith(words)
    assert "torchrun, srun, mpirun and --ranks set" in str(caught.value)


@pytest.mark.parametrize("threads", ["x", "0", "-1", "", "4,x", "1.5"])
def test_threads_are_a_number(threads: str) -> None:
    with pytest.raises(HyperslabError, match=r"^OMP_NUM_THREADS=.* is not a number of threads\n"):
        check_thread_count({"OMP_NUM_THREADS": threads})
    for fine in ({}, {"OMP_NUM_THREADS": "8"}, {"OMP_NUM_THREADS": "4,2"}):
        check_thread_count(fine)
