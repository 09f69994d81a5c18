"""The place of a rank that srun started (tier: no process)."""

from __future__ import annotations

import pytest

import hyperslab as hs
from hyperslab.comm import bootstrap
from hyperslab.comm.launchers import RankVariables, adopt_slurm, first_slurm_host
from hyperslab.errors import HyperslabError

TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HYPERSLAB_RUN")

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "123456",
}


def test_slurms_variables_become_torchruns() -> None:
    environ = dict(SLURM)
    adopt_slurm(environ)
    assert {k: v for k, v in environ.items() if not k.startswith("SLURM")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "23456",
        "HYPERSLAB_RUN": "Slurm job 123456 step 0",
    }


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # in a batch script, outside srun
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**SLURM, "RANK": "3"},
    ],
)
def test_what_is_no_rank_of_slurm(environ: dict[str, str]) -> None:
    before = dict(environ)
    adopt_slurm(environ)
    assert environ == before


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[007-012,020],login1", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("rack[2-4]-ib", "rack2-ib"),
        ("a.b.c", "a.b.c"),
    ],
)
def test_the_first_host(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


def test_steps_of_a_job_meet_apart() -> None:
    places = []
    for step in range(40):
        environ = {**SLURM, "SLURM_STEP_ID": str(step)}
        adopt_slurm(environ)
        places.append((environ["MASTER_PORT"], environ["HYPERSLAB_RUN"]))
    assert len({port for port, _ in places}) == len({run for _, run in places}) == 40
    assert places[3][1] == "Slurm job 123456 step 3"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"SLURM_PROCID": None}, "SLURM_PROCID is not set, but SLURM_JOB_ID=123456 is"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a whole number"),
        ({"SLURM_LOCALID": "-1"}, "SLURM_LOCALID='-1' is not in the range from 0 on"),
        (
            {"SLURM_STEP_NUM_TASKS": "2(x2)"},
            r"SLURM_STEP_NUM_TASKS='2\(x2\)' is not a whole number",
        ),
        ({"SLURM_JOB_ID": "12_3"}, "SLURM_JOB_ID='12_3' is not a whole number"),
        ({"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID='batch' is not a whole number"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST='' names no machine"),
    ],
    ids=str,
)
def test_odd_variables_are_named(changed: dict[str, str | None], words: str) -> None:
    environ = {k: v for k, v in (SLURM | changed).items() if v is not None}
    with pytest.raises(HyperslabError, match=f"^{words}"):
        adopt_slurm(environ)


def test_a_grid_finds_its_place_without_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """``srun python script.py``, where all that the script does is to make a grid."""
    started: list[RankVariables] = []
    monkeypatch.setattr(bootstrap, "_start", lambda place, *_: started.append(place))
    for name in (*TORCHRUNS, "SLURM_STEP_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(hs.LayoutError, match="but there are 1 ranks"):
        hs.Grid(depth=8)  # the ranks were not really started
    assert started == [RankVariables(5, 8, 1, "gpu007", 23456, None)]
