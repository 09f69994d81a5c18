"""What a folder to predict may hold: arrays, Zarr groups, several files a volume (tier: one
process)."""

from __future__ import annotations

import csv
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

from hyperslab.errors import DataError
from hyperslab.models import UNet3D
from hyperslab.train.predict import InputOutcome, predict
from tests.formats.convert.scans import nib
from tests.train.predict.runs import (
    CLASSES,
    LATTICE,
    SCANS,
    SMALL,
    UNIVERSES,
    multiscale,
    write_run,
)
from tests.train.predict.test_numbers import by_hand

WIDTH = 16


def regression(folder: Path, **data: Any) -> Path:
    data = {"path": str(folder / "gone"), "batch_size": 2, **data}
    return write_run(folder, multiscale(), UNIVERSES, model=SMALL, data=data)


def counts(seed: int, channels: int = 4) -> np.ndarray[Any, np.dtype[np.int16]]:
    shape = (channels, WIDTH, WIDTH, WIDTH)
    return np.random.default_rng(seed).poisson(2, shape).astype(np.int16)


def table(out: Path) -> dict[str, list[float]]:
    """By file and sample, the normalised numbers."""
    with (out / "parameters.csv").open() as file:
        return {
            f"{Path(row['file']).name} {row['sample']}": [
                float(value) for key, value in row.items() if key.startswith("predicted_") and
                not key.startswith("predicted_phys_")
            ]
            for row in csv.DictReader(file)
        }  # fmt: skip


def check(outcomes: list[InputOutcome], out: Path, expected: dict[str, Any]) -> None:
    assert [outcome.reason for outcome in outcomes] == [""] * len(outcomes)
    found = table(out)
    assert sorted(found) == sorted(expected)
    for name, volume in expected.items():
        assert found[name] == pytest.approx(by_hand(volume), abs=1e-5)


def test_a_folder_of_arrays_with_their_targets(tmp_path: Path) -> None:
    """As `hyperslab convert --format npy` writes it: the targets are no volumes."""
    folder = tmp_path / "in"
    folder.mkdir()
    for seed in range(2):
        np.save(folder / f"sim_{seed}.npy", counts(seed))
        np.save(folder / f"sim_{seed}.target.npy", np.zeros(4))
    outcomes = predict(regression(tmp_path / "run"), [folder], tmp_path / "out")
    expected = {f"sim_{seed}.npy sim_{seed}": counts(seed) for seed in range(2)}
    check(outcomes, tmp_path / "out", expected)


def group(path: Path, key: str, values: Any) -> None:
    zarr.create_group(path, zarr_format=3).create_array(key, data=values)


def test_zarr_groups_in_a_folder_and_by_name(tmp_path: Path) -> None:
    run = regression(tmp_path / "run")
    for seed in range(2):
        group(tmp_path / "in" / f"sim_{seed}.zarr", "full", np.moveaxis(counts(seed), 0, -1))
    out = tmp_path / "out"
    expected = {f"sim_{seed}.zarr sim_{seed}": counts(seed) for seed in range(2)}
    check(predict(run, [tmp_path / "in"], out), out, expected)
    one = tmp_path / "in" / "sim_1.zarr"
    assert [outcome.state for outcome in predict(run, [one], out)] == ["kept"]
    shutil.rmtree(one)
    group(one, "full", np.moveaxis(counts(7), 0, -1))
    assert [outcome.state for outcome in predict(run, [one], out)] == ["predicted"]
    check([], out, expected | {"sim_1.zarr sim_1": counts(7)})


def test_a_folder_of_files_by_keys(tmp_path: Path) -> None:
    """The pattern chooses; Zarr and .npz go, too; many volumes in a Zarr group."""
    run = regression(tmp_path / "run", keys={"volume": "grid"}, files="*sim_*")
    folder = tmp_path / "in"
    group(folder / "sim_0.zarr", "grid", counts(0))
    np.savez(folder / "sim_1.npz", grid=counts(1), other=np.zeros(3))
    with h5py.File(folder / "other_2.hdf5", "w") as file:
        file["grid"] = counts(2)
    out = tmp_path / "out"
    expected = {"sim_0.zarr sim_0": counts(0), "sim_1.npz sim_1": counts(1)}
    check(predict(run, [folder], out), out, expected)
    many = tmp_path / "many.zarr"
    group(many, "grid", np.stack([counts(3), counts(4)]))
    expected |= {"many.zarr 0": counts(3), "many.zarr 1": counts(4)}
    check(predict(run, [many], out), out, expected)


def test_a_folder_of_fields_in_files_of_their_own(tmp_path: Path) -> None:
    """Numbers: files that belong together are one input, whatever else lies there."""
    run = regression(tmp_path / "run", files=["gas/*", "stars/*"])
    folder = tmp_path / "in"
    for number in (2, 10):
        for field, part in (("gas", counts(number)[:2]), ("stars", counts(number)[2:])):
            (folder / field).mkdir(parents=True, exist_ok=True)
            np.save(folder / field / f"{field}_{number}.npy", part)
    out = tmp_path / "out"
    expected = {f"gas_{number}.npy gas_{number}": counts(number) for number in (2, 10)}
    check(predict(run, [folder], out), out, expected)
    assert [one.state for one in predict(run, [folder], out)] == ["kept", "kept"]
    np.save(folder / "stars" / "stars_10.npy", counts(10)[2:] + np.int16(1))
    assert [one.state for one in predict(run, [folder], out)] == ["kept", "predicted"]
    alone = predict(run, [folder / "gas" / "gas_2.npy"], tmp_path / "alone")
    assert "takes 2 files as channels" in alone[0].reason
    assert "give the folder in which they are, as gas/* and stars/*" in alone[0].reason
    (folder / "gas" / "gas_2.npy").rename(folder / "gas" / "gas_3.npy")
    with pytest.raises(DataError, match=r"2 files gas/\* and 2 stars/\* are not fields of"):
        predict(run, [folder], out)


def test_fields_whose_patterns_hold_numbers(tmp_path: Path) -> None:
    """Of redshifts, say: those of the patterns do not tell volumes apart."""
    run = regression(tmp_path / "run", files=["z0/*", "z1.5/run_*.npy"])
    folder = tmp_path / "in"
    for number in (2, 10):
        for field, part in (("z0", counts(number)[:2]), ("z1.5", counts(number)[2:])):
            (folder / field).mkdir(parents=True, exist_ok=True)
            np.save(folder / field / f"run_{number}.npy", part)
    out = tmp_path / "out"
    expected = {f"run_{number}.npy run_{number}": counts(number) for number in (2, 10)}
    check(predict(run, [folder], out), out, expected)
    (folder / "z0" / "run_2.npy").rename(folder / "z0" / "run_3.npy")
    with pytest.raises(DataError, match=r"2 files z0/\* and 2 z1.5/run_\*.npy are not fields of"):
        predict(run, [folder], out)


@pytest.mark.parametrize("name", ["no.npy", "no.hdf5", "no.nii.gz", "no.txt", "no"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    run = regression(tmp_path / "run")
    [outcome] = predict(run, [tmp_path / name], tmp_path / "out")
    assert outcome.reason.startswith(f"{tmp_path / name} does not exist")


@pytest.mark.parametrize("name", ["pipe.npy", "pipe.hdf5"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    run = regression(tmp_path / "run")
    os.mkfifo(tmp_path / name)
    [outcome] = predict(run, [tmp_path / name], tmp_path / "out")
    assert outcome.reason == f"{tmp_path / name} is not a file"


def test_fields_of_different_numbers_of_channels(tmp_path: Path) -> None:
    """Of three channels is no field of three volumes, in files of their own and by keys."""
    of_files = regression(tmp_path / "files", files=["gas/*", "stars/*"])
    by_keys = regression(tmp_path / "keys", keys={"volume": ["gas", "stars"]})
    for seed in range(2):
        gas, stars = counts(seed)[:3], counts(seed)[3:]
        for field, part in (("gas", gas), ("stars", stars)):
            (tmp_path / "in" / field).mkdir(parents=True, exist_ok=True)
            np.save(tmp_path / "in" / field / f"{field}_{seed}.npy", part)
        np.savez(tmp_path / f"both_{seed}.npz", gas=gas, stars=stars)
    out = tmp_path / "out"
    expected = {f"gas_{seed}.npy gas_{seed}": counts(seed) for seed in range(2)}
    check(predict(of_files, [tmp_path / "in"], out), out, expected)
    out = tmp_path / "out-keys"
    expected = {f"both_{seed}.npz both_{seed}": counts(seed) for seed in range(2)}
    check(
        predict(by_keys, [tmp_path / f"both_{seed}.npz" for seed in range(2)], out), out, expected
    )


def test_masks_of_volumes_whose_channels_are_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = UNet3D(2, len(CLASSES), channels=2, levels=2).eval()
    about = replace(SCANS, shape=(2, *LATTICE), whole=(2, *LATTICE), dtype="float32")
    model = {"name": "unet3d", "channels": 2, "levels": 2}
    data = {"path": str(tmp_path / "gone"), "batch_size": 1, "files": ["ct_*", "pet_*"]}
    run = write_run(tmp_path / "run", network, about, model=model, loss="dice", data=data)
    folder = tmp_path / "in"
    folder.mkdir()
    scans = np.random.default_rng(0).normal(0, 1, (2, 2, *LATTICE)).astype(np.float32)
    for number, scan in enumerate(scans):
        for field, part in zip(("ct", "pet"), scan, strict=True):
            np.save(folder / f"{field}_{number}.npy", part)
    outcomes = predict(run, [folder], tmp_path / "out")
    assert [outcome.reason for outcome in outcomes] == ["", ""]
    for number, scan in enumerate(scans):
        with torch.no_grad():
            expected = network(torch.from_numpy(scan)[None])[0].argmax(0).numpy()
        mask = nib.load(tmp_path / "out" / f"ct_{number}-mask.nii.gz")
        np.testing.assert_array_equal(np.asarray(mask.dataobj).transpose(2, 1, 0), expected)


def test_records_are_refused_with_the_way_out(tmp_path: Path) -> None:
    run = regression(tmp_path / "run")
    record = tmp_path / "in" / "sims.tfrecord"
    record.parent.mkdir()
    record.write_bytes(b"x")
    with pytest.raises(DataError, match=r"sims.tfrecord: TFRecord files .*\n.*evaluate RUN"):
        predict(run, [record.parent], tmp_path / "out")
    (one,) = predict(run, [record], tmp_path / "out")
    assert "hyperslab convert FOLDER OUT makes HDF5 files of it" in one.reason


def test_other_numbers_of_channels_are_named(tmp_path: Path) -> None:
    run = regression(tmp_path / "run")
    np.save(tmp_path / "two.npy", counts(0, 2))
    np.save(tmp_path / "flat.npy", counts(0, 1)[0])
    group(tmp_path / "three.zarr", "full", counts(0, 3))
    with h5py.File(tmp_path / "five.hdf5", "w") as file:
        file["full"] = counts(0, 5)
    names = ("two.npy", "flat.npy", "three.zarr", "five.hdf5")
    outcomes = predict(run, [tmp_path / name for name in names], tmp_path / "out")
    assert [outcome.state for outcome in outcomes] == ["failed"] * 4
    for name, outcome in zip(names, outcomes, strict=True):
        assert outcome.reason.startswith(f"{tmp_path / name}: "), outcome.reason
        assert "channels" in outcome.reason, outcome.reason
