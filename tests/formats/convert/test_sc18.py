"""To the TFRecords of Mathuriya et al. 2018 and back (tier: no process)."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import DataError
from hyperslab.formats.convert import Request, convert
from hyperslab.formats.convert.run import Outcome
from hyperslab.formats.tfrecord.source import Sc18Writer
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.universes import CENTRE, Seat, counts, public, unit
from tests.formats.writers import example, record
from tests.selection import in_gate

S = 5
TARGETS = ("Omega_m", "sigma_8", "n_s")


def universes(folder: Path, count: int, width: int = S) -> Path:
    for i in range(count):
        public(folder / f"univ_{i:03}.hdf5", counts(i, (width, width, width, 4)), i)
    return folder


def run(source: Path, out: Path, done: Any = lambda outcome: None, **how: Any) -> list[str]:
    request = Request("sc18", redshifts=(0.0,), targets=TARGETS, **how)
    return [outcome.state for outcome in convert(source, out, request, done=done)]


def physical(seed: int) -> NDArray[np.float64]:
    return (CENTRE * (1 + 0.1 * unit(seed)))[:3]


def expected(seed: int, part: NDArray[Any]) -> bytes:
    """A record as TensorFlow would have written it."""
    data = part.astype("<f8").tobytes()
    return record(example(label_raw=physical(seed).tobytes(), data_raw=data))


def test_64_samples_a_file(tmp_path: Path) -> None:
    source = universes(tmp_path / "in", 70)
    assert run(source, tmp_path / "out") == ["converted"] * 70
    files = sorted(file.name for file in (tmp_path / "out").glob("*.tfrecord"))
    assert files == ["00000.tfrecord", "00001.tfrecord"]
    parts = [expected(i, counts(i, (S, S, S, 4))[..., 0]) for i in range(70)]
    dealt = sorted(range(70), key=lambda i: hashlib.sha256(f"univ_{i:03}".encode()).digest())
    for file, held in zip(files, (sorted(dealt[:64]), sorted(dealt[64:])), strict=True):
        found = (tmp_path / "out" / file).read_bytes()
        assert found == b"".join(parts[i] for i in held)
    assert run(source, tmp_path / "out") == ["kept"] * 70


def test_sub_volumes_are_dealt_to_files_at_random(tmp_path: Path) -> None:
    """As in the paper: a file does not hold the 64 cubes of one universe."""
    source = universes(tmp_path / "in", 2, 4 * S)
    assert run(source, tmp_path / "out", width=S) == ["converted"] * 2
    found = source_of(tmp_path / "out", Seat())
    assert len(found.names) == 128
    assert found.names[64] == "00001_000"
    parts = Counter(
        counts(i, (4 * S, 4 * S, 4 * S, 4))[z : z + S, y : y + S, x : x + S, 0].tobytes()
        for i in range(2)
        for z, y, x in itertools.product(range(0, 4 * S, S), repeat=3)
    )
    whole = Box((0, 0, 0, 0), (1, S, S, S))
    assert parts == Counter(found.read(i, whole).astype("i2").tobytes() for i in range(128))
    for file in (range(64), range(64, 128)):
        assert len({found.volume(i) for i in file}) == 2


def test_there_and_back(tmp_path: Path) -> None:
    source = universes(tmp_path / "in", 5)
    run(source, tmp_path / "out")
    back = convert(tmp_path / "out", tmp_path / "back", Request("hdf5"))
    assert {outcome.state for outcome in back} == {"converted"}
    for i in range(5):
        with h5py.File(tmp_path / f"back/00000_{i:03}.hdf5") as file:
            np.testing.assert_array_equal(file["full"][()][..., 0], counts(i, (S, S, S, 4))[..., 0])
            np.testing.assert_array_equal(file["physPar"][()], physical(i))
            assert [name.decode() for name in file["namePar"]] == list(TARGETS)
            assert list(file["redshifts"]) == [0.0]
            low, high = np.array([[0.25, 0.78, 0.9], [0.35, 0.95, 1.0]])
            units = 2 * (physical(i) - low) / (high - low) - 1
            np.testing.assert_allclose(file["unitPar"][()], units, atol=1e-12)
    again = tmp_path / "again"
    assert {o.state for o in convert(tmp_path / "back", again, Request("sc18"))} == {"converted"}
    first = (tmp_path / "out/00000.tfrecord").read_bytes()
    assert (again / "00000.tfrecord").read_bytes() == first


def stop_after(count: int) -> Any:
    seen: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        seen.append(outcome)
        if len(seen) == count:
            raise KeyboardInterrupt

    return done


@pytest.fixture
def of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file holds eight samples, so that nine need two files."""
    monkeypatch.setattr(Sc18Writer, "per_file", 8)


@pytest.mark.usefixtures("of_eight")
@pytest.mark.parametrize("count", in_gate([1, 3, 8, 9, 10], kept=[1, 8, 9]))
def test_a_stopped_run_is_completed_to_the_same(tmp_path: Path, count: int) -> None:
    source = universes(tmp_path / "in", 11, 2)
    run(source, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", done=stop_after(count))
    last = sorted((tmp_path / "out").glob("*.tfrecord"))[-1]
    with last.open("ab") as file:
        file.write(b"what a killed run has begun")
    states = run(source, tmp_path / "out")
    assert states == ["kept"] * count + ["converted"] * (11 - count)
    for file in ("00000.tfrecord", "00001.tfrecord"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.usefixtures("of_eight")
def test_a_file_that_has_gone_is_made_again(tmp_path: Path) -> None:
    source = universes(tmp_path / "in", 10, 2)
    run(source, tmp_path / "out")
    (tmp_path / "out/00000.tfrecord").unlink()
    assert sorted(run(source, tmp_path / "out")) == ["converted"] * 8 + ["kept"] * 2
    found = source_of(tmp_path / "out", Seat())
    assert len(found.names) == 10
    held = {found.target(i).tobytes() for i in range(10)}
    assert len(held) == 10
    assert run(source, tmp_path / "out") == ["kept"] * 10


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    source = universes(tmp_path / "in", 3, 2)
    run(source, tmp_path / "out")
    file = tmp_path / "out/00000.tfrecord"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"00000\.tfrecord: has \d+ bytes but had \d+ when 'univ"):
        run(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda lines: [lines[0], *lines[2:]],
            r"begins at byte \d+, and the one before it ends at 0",
        ),
        (
            lambda lines: [line.replace('"univ_001", "sums', '"univ_01", "sums') for line in lines],
            "'univ_01' is no sample of 'univ_001'",
        ),
        (lambda lines: [*lines, lines[2].replace('"univ_001"', '"other"')], "begins at byte"),
        (
            lambda lines: [line.replace("0.tfrecord", "0.h5") for line in lines],
            "is not a file of it",
        ),
        (
            lambda lines: [line.replace("shard", "card") for line in lines],
            "'univ_000' has no shard",
        ),
        (lambda lines: [line.replace('"target"', '"aim"') for line in lines], "has no target"),
    ],
)
def test_a_record_that_would_double_a_sample_is_refused(
    tmp_path: Path, change: Callable[[list[str]], list[str]], words: str
) -> None:
    source = universes(tmp_path / "in", 3, 2)
    run(source, tmp_path / "out")
    path = tmp_path / "out/conversion.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    before = (tmp_path / "out/00000.tfrecord").read_bytes()
    with pytest.raises(DataError, match=rf"conversion\.jsonl: is not a record of .*{words}"):
        run(source, tmp_path / "out")
    assert (tmp_path / "out/00000.tfrecord").read_bytes() == before


def test_a_bad_volume_is_left_out_and_its_place_taken(tmp_path: Path) -> None:
    source = universes(tmp_path / "in", 4, 2)
    (source / "univ_001.hdf5").write_bytes(b"")
    assert sorted(run(source, tmp_path / "out")) == ["converted"] * 3 + ["failed"]
    parts = [expected(i, counts(i, (2, 2, 2, 4))[..., 0]) for i in (0, 2, 3)]
    assert (tmp_path / "out/00000.tfrecord").read_bytes() == b"".join(parts)


def test_what_they_cannot_hold_is_refused(tmp_path: Path) -> None:
    source = universes(tmp_path / "in", 1)
    out = tmp_path / "out"

    def error(**how: Any) -> str:
        with pytest.raises(DataError) as caught:
            convert(source, out, Request("sc18", **how))
        return str(caught.value)

    assert "4 channels (SC18's files hold one redshift: --redshifts 0); hdf5" in error()
    assert "--targets Omega_m,sigma_8,n_s" in error(redshifts=(0.0,))
    assert "the parameters sigma_8 (SC18's" in error(redshifts=(0.0,), targets=("sigma_8",))
    public(source / "univ_000.hdf5", counts(0, (S, S, S, 4)), 0, physPar=None)
    assert "physical values are not known" in error(redshifts=(0.0,), targets=TARGETS)
    assert "redshift 2 is not there" in error(redshifts=(2.0,))
    assert not out.exists()


def test_a_selection_goes_into_other_formats(tmp_path: Path) -> None:
    source = universes(tmp_path / "in", 2)
    request = Request("hdf5", redshifts=(3.0, 0.5), targets=("sigma_8",))
    convert(source, tmp_path / "out", request)
    with h5py.File(tmp_path / "out/univ_001.hdf5") as file:
        whole = counts(1, (S, S, S, 4))
        np.testing.assert_array_equal(file["full"][()], whole[..., [3, 1]])
        assert list(file["redshifts"]) == [3.0, 0.5]
        assert list(file["unitPar"]) == [unit(1)[1]]
        assert list(file["namePar"]) == [b"sigma_8"]
        assert list(file["physPar"]) == [physical(1)[1]]
    with pytest.raises(DataError, match="was converted with parameters"):
        convert(source, tmp_path / "out", Request("hdf5", redshifts=(3.0, 0.5)))


def test_the_command(tmp_path: Path) -> None:
    source = universes(tmp_path / "in", 2)
    words = ["convert", str(source), str(tmp_path / "out"), "--format", "sc18"]
    words += ["--redshifts", "0", "--targets", "Omega_m, sigma_8, n_s"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "out/conversion.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["targets"] == list(TARGETS)
    assert [json.loads(line)["shard"][0] for line in lines[1:]] == ["00000.tfrecord"] * 2
    bad = CliRunner().invoke(app, [*words, "--redshifts", "now"])
    assert bad.exit_code == 2
    assert "give numbers with commas" in bad.output
