"""What hyperslab or a user writes beside volumes: recipes, journals, checkpoints, run folders."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import torch
import zarr
from rich.console import Console

import hyperslab as hs
import hyperslab.train.predict as predicting
from hyperslab.checkpoint.files import CHECKPOINT_FORMAT
from hyperslab.checkpoint.retention import latest
from hyperslab.errors import DataError
from hyperslab.formats.convert.run import Request, convert
from hyperslab.planner.machine import load_machine
from hyperslab.recipe.load import load_recipe, save_recipe
from hyperslab.studies.report import write_comparison, write_report
from hyperslab.studies.sweep.results import RunResult
from hyperslab.studies.sweep.run import DoRun, SweepProgress, run_sweep
from hyperslab.studies.sweep.schema import SweepRun, load_sweep
from hyperslab.train.builders import check_targets, open_data
from hyperslab.train.input_files import MASK_SUFFIXES
from hyperslab.train.mask_files import MaskFormat
from hyperslab.train.predict import JOURNAL, Journal, predict
from hyperslab.train.profile import (
    predicted_path,
    profile_path,
    read_profile,
    read_profiles,
    write_profile,
)
from hyperslab.train.run import train
from hyperslab.train.samples import WindowPolicy
from tests.checkpoint.forged import write_sums
from tests.formats import writers
from tests.formats.convert import scans
from tests.formats.nifti import lists
from tests.formats.universes import counts, public
from tests.soak.fuzz.files import SC18, cubes, keyed_by_user, read_samples
from tests.soak.fuzz.mutate import BINARY, HDF5, TEXT
from tests.soak.fuzz.subject import Digest, Subject
from tests.studies.report import fake_scans
from tests.studies.report.compared import write_swept
from tests.studies.report.fake import fake_run
from tests.studies.report.test_timelines import a_profile
from tests.studies.sweep.sweeps import way, write_sweep
from tests.train.predict.runs import write_segmentation
from tests.train.predict.test_mask_files import stopped_after

TO_HDF5 = Request("hdf5")
SPEAKING = ("data.", "model.", "loss.", "optimizer.", "metrics.")
"""How keys of a recipe begin that say where an error is, in place of the file."""


def journal(make: Callable[[Path], object], request: Request) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        make(folder / "origin")
        convert(folder / "origin", folder / "out", request)

    return write


def go_on(request: Request) -> Callable[[Path], Digest]:
    def read(folder: Path) -> Digest:
        before = sorted(path for path in folder.parent.parent.glob("*"))
        convert(folder / "origin", folder / "out", request)
        assert sorted(path for path in folder.parent.parent.glob("*")) == before
        return read_samples(folder / "out")

    return read


def predictions(folder: Path) -> None:
    folder.mkdir()
    rows = [{"by": "me"}, *({"name": f"a{i}", "path": "x", "bytes": i} for i in range(4))]
    (folder / "predictions.jsonl").write_text("".join(f"{row}\n" for row in map(_json, rows)))


def _json(value: Any) -> str:
    return json.dumps(value)


def read_predictions(folder: Path) -> Digest:
    return repr(sorted(Journal(folder, {"by": "me"}).rows))


def copied(file: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        shutil.copy(file, folder / "it.yaml")
        if "sweeps" in file:
            (folder / "it.yaml").write_text(
                Path(file).read_text().replace("../", f"{Path('recipes').absolute()}/")
            )

    return make


def targets(folder: Path) -> None:
    """A recipe of somebody's own classes, and of scans that a list names."""
    lists.decathlon(folder, ((8, 8, 8), (8, 8, 8), (8, 8, 8)))
    text = Path("recipes/segresnet.yaml").read_text()
    (folder / "it.yaml").write_text(text.replace("phantoms/", f"{folder.with_name('case')}/"))


def read_targets(folder: Path) -> Digest:
    """As far as a training goes before it opens its data."""
    recipe = load_recipe(folder / "it.yaml")
    check_targets(recipe)
    return repr(recipe)


def own_data(folder: Path) -> None:
    """A recipe that says where volumes and their parameters are, and how they are split."""
    keyed_by_user(folder / "sims")
    (folder / "table.csv").write_text("name,Omega0,seed\nsim_0,0.1,5\nsim_1,0.2,6\nsim_2,0.3,7\n")
    (folder / "test.txt").write_text("# held out\nsim_2\n")
    (folder / "it.yaml").write_text(OWN_DATA.format(folder=folder.with_name("case")))


OWN_DATA = """\
data:
  path: {folder}/sims
  files: "sim_*.hdf5"
  keys: {{volume: grid/delta}}
  table: {folder}/table.csv
  columns: [Omega0, seed]
  targets: [Omega0]
  ranges: {{Omega0: [0.0, 0.5]}}
  train: [sim_0]
  validation: ["1:2"]
  test: {folder}/test.txt
  batch_size: 1
"""


def read_own_data(folder: Path) -> Digest:
    recipe = load_recipe(folder / "it.yaml")
    found = hashlib.sha256()
    for split in ("train", "validation", "test"):
        with open_data(recipe, hs.Grid(), split=split, shuffle=False) as data:
            for x, y in data.epoch(0):
                found.update(x.local.numpy().tobytes() + y.numpy().tobytes())
    return found.hexdigest()


def swept(folder: Path) -> None:
    """A sweep that is done."""
    write_sweep(folder, output=str(folder.with_name("case") / "out"))
    sweep_on(folder, folder / "out", way(_pretend))


def _pretend(run: SweepRun, ranks: int) -> RunResult:
    run.folder.mkdir(parents=True)
    save_recipe(run.recipe, run.folder / "recipe.yaml")
    scores: dict[str, float | None] = {"Omega_m": 0.5, "sigma_8": None}
    result = RunResult(run.recipe.epochs, 100 * run.rate, 2, 9.5, scores, 0.5, None)
    (run.folder / "result.json").write_text(json.dumps(asdict(result)))
    return result


def _refuse(run: SweepRun, ranks: int) -> RunResult:
    raise DataError(f"{run.folder} is not done")


def sweep_on(folder: Path, output: Path, do: DoRun) -> None:
    sweep = load_sweep(folder / "sweep.yaml", output=output)
    run_sweep(sweep, 1, SweepProgress(sweep, Console(quiet=True)), [do])


def read_swept(folder: Path) -> Digest:
    sweep_on(folder, folder / "out", way(_refuse))
    return (folder / "out" / "sweep.json").read_text()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv3d(1, 4, 3), torch.nn.BatchNorm3d(4))


def checkpoint(folder: Path) -> None:
    folder.mkdir()
    model = network()
    hs.save(folder / "step", model, torch.optim.Adam(model.parameters()), epoch=3)


def read_checkpoint(folder: Path) -> Digest:
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    extra = hs.load(folder / "step", model, torch.optim.Adam(model.parameters()))
    state = [value.numpy().tobytes() for value in model.state_dict().values()]
    return hashlib.sha256(repr(sorted(extra.items())).encode() + b"".join(state)).hexdigest()


def run(folder: Path) -> None:
    """Histories, an evaluation, profiles of two ranks."""
    path = fake_run(folder, epochs=3, wanted=3)
    for rank in range(2):
        write_profile(profile_path(path, rank), a_profile(rank))


def profiles(folder: Path) -> None:
    """Those of two ranks, and what was predicted."""
    for rank in range(2):
        write_profile(profile_path(folder, rank), a_profile(rank))
    write_profile(predicted_path(folder), a_profile(0, scale=0.9))


def read_all_profiles(folder: Path) -> Digest:
    return repr([*read_profiles(folder), read_profile(predicted_path(folder))])


def run_of_scans(folder: Path) -> None:
    fake_scans.fake_run(folder, epochs=3)


def read_page(folder: Path) -> Digest:
    write_report(folder / "run")
    return ""


def read_compared(folder: Path) -> Digest:
    write_comparison([folder])
    return ""


def trained(folder: Path) -> None:
    """A run of three epochs and as many checkpoints."""
    folder.mkdir()
    (folder / "it.yaml").write_text(TRAINED)
    train(load_recipe(folder / "it.yaml", [f"output={folder / 'run'}"]))


TRAINED = """\
data: {synthetic: {width: 16, samples: 6}, batch_size: 2}
model: {variant: lbann}
kernels: fixed
device: cpu
checkpoint: {every_steps: 1}
ema: 0.9
epochs: 2
"""


def train_on(folder: Path) -> Digest:
    """What is lost is trained again, so the end is the same."""
    train(load_recipe(folder / "it.yaml", [f"output={folder / 'run'}"]), resume=True)
    newest = latest(folder / "run")
    assert newest is not None
    rows = (folder / "run" / "steps.csv").read_text().splitlines()
    losses = [line.split(",")[2] for line in rows]
    tensors = b"".join(path.read_bytes() for path in sorted(newest.glob("*.safetensors")))
    return repr(losses) + hashlib.sha256(tensors).hexdigest()


def to_predict(folder: Path) -> None:
    """A trained network, and volumes for it."""
    for i in range(3):
        public(folder / "volumes" / f"univ_{i}.hdf5", counts(i, (16, 16, 16, 4)), i)
    (folder / "it.yaml").write_text(TRAINED)
    options = [f"output={folder / 'run'}", f"data.path={folder / 'volumes'}", "epochs=1"]
    train(load_recipe(folder / "it.yaml", ["data.synthetic=null", "data.counts=[1,1,1]", *options]))


def read_to_predict(folder: Path) -> Digest:
    outcomes = predict(folder / "run", [str(folder / "volumes")], folder / "out")
    for outcome in outcomes:
        if outcome.state == "failed":
            raise DataError(outcome.reason)
    return (folder / "out" / "parameters.csv").read_text()


def read_with_sums(read: Callable[[Path], Digest]) -> Callable[[Path], Digest]:
    """Somebody meant what the checkpoints hold: their sums are made anew."""

    def read_meant(folder: Path) -> Digest:
        for path in folder.glob("run/checkpoints/step-*"):
            write_sums(path, format=CHECKPOINT_FORMAT)
        return read(folder)

    return read_meant


def predicted(folder: Path) -> None:
    """Volumes whose parameters are there already."""
    to_predict(folder)
    read_to_predict(folder)
    _move_journal(folder)


def _move_journal(folder: Path) -> None:
    """A journal is about files by their whole paths, and cases lie elsewhere."""
    path = folder / "out" / JOURNAL
    path.write_text(path.read_text().replace(str(folder), str(folder.with_name("case"))))


WINDOWS = WindowPolicy((8, 12, 16), 0.5)


def _predict_scan(folder: Path, format: MaskFormat) -> None:
    scan, out = [folder / "a.nii.gz"], folder / "out"
    (outcome,) = predict(folder / "run", scan, out, native=True, windows=WINDOWS, format=format)
    if outcome.state == "failed":
        raise DataError(outcome.reason)


def stopped_mask(format: MaskFormat) -> Callable[[Path], None]:
    """A scan whose mask is half written."""

    def make(folder: Path) -> None:
        write_segmentation(folder / "run")
        scans.write(folder / "a.nii.gz", scans.numbers((21, 18, 25)))
        stops = stopped_after(3, predicting.predict_mask)
        with mock.patch.object(predicting, "predict_mask", stops), suppress(KeyboardInterrupt):
            _predict_scan(folder, format)
        (folder / "out" / f".a{MASK_SUFFIXES[format]}.partial").write_text("an earlier kill's")
        _move_journal(folder)

    return make


def go_on_with_hdf5(folder: Path) -> Digest:
    _predict_scan(folder, "hdf5")
    with h5py.File(folder / "out" / "a-mask.hdf5") as file:
        return hashlib.sha256(file["segmentation"][()].tobytes()).hexdigest()


def go_on_with_zarr(folder: Path) -> Digest:
    _predict_scan(folder, "zarr")
    mask = zarr.open_group(folder / "out" / "a-mask.zarr", mode="r")["0"]
    assert isinstance(mask, zarr.Array)
    return hashlib.sha256(np.asarray(mask[:]).tobytes()).hexdigest()


def weights(path: Path) -> bool:
    return path.name != "manifest.json"


RECORDS: dict[str, Subject] = {
    "recipe": Subject(
        copied("recipes/demo.yaml"), lambda f: repr(load_recipe(f / "it.yaml")), TEXT
    ),
    "sweep": Subject(
        copied("recipes/sweeps/figure9.yaml"), lambda f: repr(load_sweep(f / "it.yaml")), TEXT
    ),
    "machine": Subject(
        copied("src/hyperslab/planner/machines/lassen-v100.yaml"),
        lambda f: repr(load_machine(f / "it.yaml")),
        TEXT,
    ),
    "targets": Subject(targets, read_targets, TEXT, "it.yaml", keys=SPEAKING),
    "own-data": Subject(own_data, read_own_data, TEXT, "*.*t*", keys=SPEAKING),
    "swept": Subject(swept, read_swept, TEXT, "*.*"),
    "journal": Subject(
        journal(writers.tfrecords(False), TO_HDF5), go_on(TO_HDF5), TEXT, "conversion.jsonl"
    ),
    "journal-sc18": Subject(journal(cubes, SC18), go_on(SC18), TEXT, "conversion.jsonl"),
    "profile": Subject(profiles, read_all_profiles, TEXT),
    "predictions": Subject(predictions, read_predictions, TEXT),
    "checkpoint": Subject(checkpoint, read_checkpoint, (*BINARY, *TEXT), "*", weights),
    "trained": Subject(trained, train_on, (*BINARY, *TEXT), "run/**/*"),
    "predict": Subject(to_predict, read_to_predict, HDF5, "volumes/*"),
    "trained-meant": Subject(trained, read_with_sums(train_on), TEXT, "step-*/state.json"),
    "predict-meant": Subject(
        to_predict, read_with_sums(read_to_predict), TEXT, "step-*/state.json"
    ),
    "predicted": Subject(predicted, read_to_predict, TEXT, "out/*"),
    "mask-hdf5": Subject(stopped_mask("hdf5"), go_on_with_hdf5, (*TEXT, *BINARY), "out/*"),
    "mask-zarr": Subject(stopped_mask("zarr"), go_on_with_zarr, (*TEXT, *BINARY), "out/*"),
    "foreign-run": Subject(to_predict, read_to_predict, (*BINARY, *TEXT), "run/**/*"),
    "page": Subject(run, read_page, TEXT, "*.*"),
    "page-scans": Subject(run_of_scans, read_page, (*TEXT, *BINARY), "run/**/*"),
    "page-compared": Subject(write_swept, read_compared, TEXT, "*.*"),
}
