"""A folder of universes: layout, seeds, resuming, bad input (tier: no process)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from hyperslab.cli.simulate import simulate_command as command
from hyperslab.errors import DataError
from hyperslab.simulate import one_universe, universes
from hyperslab.simulate.nbody import Nbody
from hyperslab.simulate.universes import make_universes as api
from tests.simulate.conftest import SIZE, STEPS


@pytest.fixture(autouse=True)
def _compiled_once(small: Nbody, monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(*, size: int, particles: int, steps: int) -> Nbody:
        assert (size, particles, steps) == (SIZE, SIZE, STEPS)
        return small

    monkeypatch.setattr(one_universe, "Nbody", shared)


def simulate(folder: Path, *, count: int = 3, **changed: Any) -> list[Path]:
    return api(folder, **{"count": count, "size": SIZE, "steps": STEPS, **changed})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_public_layout(tmp_path: Path) -> None:
    for path in simulate(tmp_path / "new" / "folder"):
        with h5py.File(path) as file:
            assert sorted(file) == ["full", "namePar", "physPar", "redshifts", "unitPar"]
            full = file["full"]
            assert full.shape == (SIZE, SIZE, SIZE, 4)
            assert full.dtype == np.int16
            assert list(full[:].reshape(-1, 4).mean(0)) == [1.0] * 4  # exactly
            assert full[:].min() == 0
            assert list(file["namePar"]) == [b"Omega_m", b"sigma_8", b"n_s", b"H_0"]
            assert list(file["redshifts"]) == [0.0, 0.5, 1.5, 3.0]
            assert np.abs(file["unitPar"][:]).max() <= 1
            assert file["physPar"].shape == (4,)


def test_parts_fill_a_folder_as_one_process_does(tmp_path: Path) -> None:
    simulate(tmp_path / "whole", count=5)
    for part in (1, 0, 1):  # one comes back, and finds its universes
        found = simulate(tmp_path / "parts", count=5, part=(part, 2))
        assert [path.stem[-1] for path in found] == [str(i) for i in range(part, 5, 2)]
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_parts_work_at_once_and_keep_out_a_command_for_the_whole_folder(tmp_path: Path) -> None:
    def another(_: Path) -> None:
        if not (tmp_path / "univ_ics_000001.hdf5").exists():
            simulate(tmp_path, count=2, part=(1, 2))
            with pytest.raises(DataError, match="another simulation into it is under way"):
                simulate(tmp_path, count=2)

    simulate(tmp_path, count=2, part=(0, 2), done=another)
    assert len(contents(tmp_path)) == 2


def test_a_rank_does_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(command)
    words = [str(tmp_path), "--count", "3", "--size", str(SIZE), "--steps", str(STEPS)]
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29400")
    done = CliRunner().invoke(app, words)
    assert done.output.endswith(f"1 universes in {tmp_path}, part 1 of 2\n")
    assert [*contents(tmp_path)] == ["univ_ics_000001.hdf5"]
    done = CliRunner().invoke(app, [*words, "--part", "0/3"])
    assert [*contents(tmp_path)] == ["univ_ics_000000.hdf5", "univ_ics_000001.hdf5"]
    for odd in ("3/3", "a/b", "1", "-1/2"):
        said = CliRunner().invoke(app, [*words, "--part", odd]).output
        assert "give K/N" in " ".join(said.split())


def test_a_seed_gives_the_same_bytes_whatever_the_count(tmp_path: Path) -> None:
    simulate(tmp_path / "a", seed=4)
    simulate(tmp_path / "b", seed=4, count=2)
    simulate(tmp_path / "c", seed=5, count=2)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert len(a) == 3
    assert b == {name: a[name] for name in b}
    assert all(c[name] != a[name] for name in c)
    assert len(set(a.values())) == 3


def test_only_the_named_parameters_vary(tmp_path: Path) -> None:
    for path in simulate(tmp_path, parameters=["sigma_8"], count=2):
        with h5py.File(path) as file:
            assert list(file["unitPar"][:] != 0) == [False, True, False, False]
            assert list(file["physPar"][[0, 2, 3]]) == [0.3, 0.96, 70.0]


def test_a_run_killed_midway_is_completed_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tmp_path / "whole")
    write = one_universe.write_universe

    def write_the_first(path: Path, *rest: Any, **how: Any) -> None:
        if path != killed / "univ_ics_000000.hdf5":
            raise KeyboardInterrupt
        write(path, *rest, **how)

    killed = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(one_universe, "write_universe", write_the_first)
        with pytest.raises(KeyboardInterrupt):
            simulate(killed)
    (killed / "univ_ics_000001.hdf5.partial").write_bytes(b"half of a universe")
    before = (killed / "univ_ics_000000.hdf5").stat().st_mtime_ns
    assert not (killed / "univ_ics_000001.hdf5").exists()
    done: list[Path] = []
    simulate(killed, done=done.append)
    assert contents(killed) == contents(tmp_path / "whole")
    assert (killed / "univ_ics_000000.hdf5").stat().st_mtime_ns == before  # kept
    assert len(done) == 3


def test_a_finished_folder_is_not_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tmp_path)
    monkeypatch.setattr(one_universe, "Nbody", None)
    assert len(simulate(tmp_path)) == 3


def test_universes_of_an_earlier_version_are_not_mixed_with_those_of_this_one(
    tmp_path: Path,
) -> None:
    (path,) = simulate(tmp_path, count=1)
    with h5py.File(path, "r+") as file:
        del file.attrs["method"]
    with pytest.raises(DataError, match=r"univ_ics_000000.hdf5 was made with method = None, not "):
        simulate(tmp_path, count=2)


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 9), ("box_size", 99.0), ("parameters", ("n_s",)), ("size", 7)]
)
def test_another_folder_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    simulate(tmp_path, count=1)
    with pytest.raises(DataError, match=f"univ_ics_000000.hdf5 was made with {name} = "):
        simulate(tmp_path, count=2, **{name: value})
    assert len(contents(tmp_path)) == 1


def test_a_pipe_in_the_place_of_a_universe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "univ_ics_000000.hdf5")
    with pytest.raises(DataError, match=r"univ_ics_000000.hdf5 is not a plain file: delete it"):
        simulate(tmp_path, count=1)


def test_a_file_of_another_kind_is_no_universe(tmp_path: Path) -> None:
    (path,) = simulate(tmp_path, count=1)
    with h5py.File(path, "r+") as file:
        file.attrs["seed"] = np.arange(5)
    with pytest.raises(DataError, match=r"made with seed = \[0 1 2 3 4\], not "):
        simulate(tmp_path, count=1)
    with h5py.File(path, "w") as file:
        file.create_group("full")
    with pytest.raises(DataError, match=r"000000.hdf5 is not a simulated universe .*'full' is no"):
        simulate(tmp_path, count=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": 0}, "size must be at least 1, not 0"),
        ({"count": 0}, "count must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**63}, "seed must be less than 2"),
        ({"box_size": 1e-300}, "box size must be a length in Mpc/h from 0.001 to 1e"),
        ({"box_size": 1e300}, "box size must be a length"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"particles": 1}, "particles must be at least 2"),
        ({"box_size": 0.0}, "box size must be a length"),
        ({"box_size": float("nan")}, "box size must be a length"),
        ({"parameters": ["sigma_9"]}, "did you mean 'sigma_8'"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        simulate(tmp_path / "out", **changed)
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"cannot make the folder .*file"):
        simulate(tmp_path / "file" / "out")


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(tmp_path: Path, threads: int) -> None:
    before = torch.get_num_threads()
    simulate(tmp_path / "as it is", count=5)
    try:
        torch.set_num_threads(threads)
        simulate(tmp_path / "other", count=5)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert contents(tmp_path / "other") == contents(tmp_path / "as it is")


def test_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(tmp_path / "alone", count=3)
    monkeypatch.setattr(universes, "WORTH_WORKERS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(one_universe, "_nbody", None)  # nothing is made in this process
    done: list[Path] = []
    found = simulate(tmp_path / "together", count=3, done=done.append)
    assert sorted(done) == found
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")


def test_threads_of_a_program_share_nothing(small: Nbody) -> None:
    physical = np.array([0.3, 0.8, 0.96, 70.0])
    noises = [np.array([0, index], np.uint32) for index in range(16)]
    alone = [small(physical, 20.0, noise) for noise in noises]
    with ThreadPoolExecutor(4) as pool:
        together = [*pool.map(lambda noise: small(physical, 20.0, noise), noises)]
    assert all(map(np.array_equal, together, alone))


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    options = ["--count", "2", "--size", str(SIZE), "--steps", str(STEPS), "--seed", "3"]
    options += ["--box-size", "20", "--parameters", "Omega_m, sigma_8"]
    result = CliRunner().invoke(app, [str(tmp_path / "cli"), *options], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.split("\n") == [f"2 universes in {tmp_path / 'cli'}", ""]  # no bar
    simulate(tmp_path / "api", count=2, seed=3, box_size=20.0, parameters=["Omega_m", "sigma_8"])
    assert contents(tmp_path / "cli") == contents(tmp_path / "api")
