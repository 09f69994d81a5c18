"""Starts wait for nothing that they do not use (tier: a few child processes)."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import hyperslab as hs
from hyperslab.cli import COMMANDS, load_command, rank
from hyperslab.cli.report import FIGURE_FORMATS
from hyperslab.cli.scale import scale_command
from hyperslab.errors import LayoutError, RecipeError
from hyperslab.recipe.instantiate import check_exists
from hyperslab.recipe.load import _fields, load_recipe, torch_classes
from hyperslab.recipe.trust import Trust
from hyperslab.studies.report import FigureFormat
from hyperslab.studies.scaling.points import ScalingKind
from hyperslab.train.metrics import SURFACE_TOLERANCE
from hyperslab.train.profiler import ProfilePolicy
from hyperslab.util.gpu_memory import machine_has_gpu, torch_knows_cuda
from hyperslab.util.optional_libraries import current_versions
from tests.docs.blocks import DOCS
from tests.forked import forked_commands
from tests.formats.universes import counts, public, write

ROOT = DOCS.parent
SLOW = ("torch", "numpy", "pydantic", "rich", "matplotlib", "h5py", "yaml", "tensorboard")


def modules_after(*statements: str) -> list[set[str]]:
    """The modules that a fresh process has imported after each of these statements in turn."""
    say = "print(*sys.modules, file=sys.__stderr__)\n"
    program = "import sys\n" + "".join(f"{statement}\n{say}" for statement in statements)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stderr.splitlines()]


def command(words: str) -> str:
    return f"""
import hyperslab.cli
sys.argv[1:] = {words.split()!r}
try:
    hyperslab.cli.main()
except SystemExit as end:
    assert not end.code
"""


@pytest.mark.parametrize(
    ("overviews", "needed"),
    [
        (["--version"], set()),
        (["--help"], {"rich"}),
        (["train --help", "convert lits --help", "recipes copy --help"], {"pydantic"}),
    ],
    ids=str,
)
def test_overviews_import_neither_torch_nor_numpy(overviews: list[str], needed: set[str]) -> None:
    for words, found in zip(overviews, modules_after(*map(command, overviews)), strict=True):
        assert found.intersection(SLOW) - needed - {"yaml"} == set(), words


HELP = [
    *(f"{name} --help" for name in COMMANDS),
    *(f"convert {below} --help" for below in ("folder", "lits", "scans")),
]
WRONG = {
    # files and folders
    "train nowhere.yaml": "cannot read the recipe nowhere.yaml: No such file or directory",
    "plan nowhere.yaml": "cannot read the recipe nowhere.yaml: No such file or directory",
    "inspect nowhere": "nowhere: does not exist; give the folder that holds the data",
    "inspect empty": "empty: no file *.hdf5, *.h5, *.npy,",
    "evaluate nowhere": "nowhere is not the folder of a run: it has no recipe.yaml",
    "predict nowhere a.nii --out x": "nowhere is not the folder of a run",
    "scale strong nowhere.yaml --ranks 1": "cannot read the recipe nowhere.yaml: No such file",
    "sweep nowhere.yaml": "cannot read the sweep nowhere.yaml: No such file or directory",
    "report nowhere": "nowhere is not the folder of a run: it has no recipe.yaml",
    "report empty": "empty is not the folder of a run: it has no recipe.yaml",
    "convert nowhere x": "nowhere: does not exist; give the folder that holds the data",
    "convert empty x": "empty: no file *.hdf5, *.h5, *.npy,",
    "convert scans nowhere x --spacing 1": "nowhere: does not exist",
    "convert scans empty x --spacing 1": "empty: no scan *.nii, *.nii.gz in it or below",
    "train data.yaml": "nowhere: does not exist; give the folder that holds the data",
    "train data.yaml data.path=empty": "empty: no file *.hdf5, *.h5, *.npy,",
    "evaluate done data.synthetic=null data.path=empty": "empty: no file *.hdf5, *.h5,",
    "sweep bad.yaml": "bad.yaml is not valid YAML: ",
    "train bad.yaml": "bad.yaml is not valid YAML: ",
    "train .": "cannot read the recipe .: Is a directory",
    "calibrate bad.yaml --out m.yaml": "bad.yaml is not valid YAML: ",
    "calibrate --out bad.yaml": "the machine file bad.yaml is not valid YAML",
    "calibrate --out nowhere/m.yaml": "cannot write --out nowhere/m.yaml: No such file",
    "doctor --folder nowhere": "nowhere cannot be written on",
    "doctor --folder nowhere --ranks 2": "nowhere cannot be written on",
    "recipes copy nonsense": "there is no shipped recipe 'nonsense'",
    "train r.yaml output=r.yaml": "output r.yaml is not a folder\n    choose another --output",
    "train r.yaml output=r.yaml/x": "output r.yaml is not a folder\n    choose another --output",
    "train data.yaml data.path=arrays data.table=t.csv": "there is no t.csv, in arrays or from",
    "predict done a --out r.yaml": "output r.yaml is not a folder\n    choose another --out\n",
    "scale strong r.yaml --ranks 2 --output r.yaml": "output r.yaml is not a folder\n",
    "sweep s.yaml --output r.yaml/x": "output r.yaml is not a folder\n    choose another --output",
    "plan r.yaml --json empty": "cannot write --json empty: it is a folder\n    give a file",
    "report run --json empty": "cannot write --json empty: it is a folder\n    give a file",
    "report run done --output empty": "cannot write --output empty: it is a folder",
    "report run done --output nowhere/x.html": "cannot write --output nowhere/x.html: No such file",
    "train s.yaml": "s.yaml is a sweep, not a recipe\n    hyperslab sweep s.yaml",
    "sweep r.yaml": "r.yaml is a recipe, not a sweep\n    hyperslab train r.yaml",
    "train r.yaml output=done": "output done holds a run already\n    go on with --resume",
    "train r.yaml output=done seed=1 --resume": "--resume: seed is 1 but the run in output done",
    "evaluate run": "run has no checkpoint 'best'; it has none: train it first",
    "evaluate done --checkpoint step-2": "done has no checkpoint 'step-2'; it has: step-0000",
    "predict run a --out b": "run has no checkpoint 'best'; it has none: train it first",
    # options
    "train --foo": "No such option: --foo",
    "train": "Missing argument 'recipe'",
    "train r.yaml --rank 3": "No such option: --rank",
    "train r.yaml --ranks 0": "'--ranks': Input should be greater than or equal to 1",
    "train r.yaml --ranks x": "'--ranks': Input should be a valid integer",
    "train r.yaml --output": "Option '--output' requires an argument",
    "scale strang r.yaml": "'strang' is not one of 'strong', 'weak'",
    "convert a": "Missing argument 'OUT'",
    "convert scans a b --spacin 1": "No such option: --spacin",
    "predict run": "Missing argument 'INPUT...'",
    "calibrate": "Missing option '--out'",
    "simulate a --count x": "'--count': Input should be a valid integer",
    "plan r.yaml --al": "No such option: --al",
    "compile now": "Got unexpected extra argument(s) (now)",
    "train r.yaml --ranks 3 grid.depth=2 grid.data=2": "--ranks is 3 but the grid has 4 places",
    "report run run": "run is given twice; a run is compared with others",
    "plan r.yaml --json nowhere/x.json": "cannot write --json nowhere/x.json: No such file",
    "plan r.yaml --calibrate nowhere/m.yaml": "cannot write --calibrate nowhere/m.yaml: No",
    "plan data.yaml": "data.path nowhere is not on this machine, so the shape of its volumes is",
    "plan data.yaml data.path=empty": "empty: no file *.hdf5, *.h5, *.npy,",
    "train r.yaml grid.depth=64": "cannot cut volumes of 16 voxels along depth into 64 shards",
    "train unet.yaml model.levels=3 grid.width=9 data.subvolume=8": "cannot cut volumes of 8 voxel",
    "train r.yaml data.synthetic.width=17": "CosmoFlow 'lbann' takes no width 17: use one of 16,",
    "train r.yaml model.width=32": "holds volumes of [16, 16, 16] voxels but the model takes [32,",
    "train unet.yaml": "model.levels=5 needs volumes of at least 32 voxels along each side",
    "train r.yaml data.subvolume=5": "data.subvolume=5 does not divide the extents of data.synth",
    "plan r.yaml data.subvolume=4": "CosmoFlow 'lbann' takes no width 4: use one of 16, 32,",
    "plan r.yaml --shape 4,8,16,16": "--shape 4,8,16,16: data.synthetic holds volumes of [8, 16,",
    "scale strong r.yaml model.width=32 --ranks 1": "[16, 16, 16] voxels but the model takes [32,",
    "scale strong r.yaml --ranks 3 --axis data": "a mini-batch of 4 cannot be dealt out evenly to",
    "scale strong r.yaml grid.width=2 --ranks 3": "3 ranks do not make a grid that grows along",
    "scale strong r.yaml --grid depth=2 --grid width=2": "two grids have 2 ranks",
    "scale strong r.yaml --ranks 32": "32 ranks (depth 32): cannot cut volumes of 16 voxels along",
    "scale weak r.yaml grid=auto --ranks 2": "weak scaling adds replicas, and grid=auto does not",
    "scale strong data.yaml --ranks 1": "data.path nowhere is not here\n    data.path=null",
    "train r.yaml grid=auto": "grid=auto needs to know how many ranks to start: give --ranks",
    "plan r.yaml grid.auto=true": "grid=auto needs to know for how many ranks to plan",
    "plan r.yaml --shape x": "--shape x: give C,D,H,W",
    "plan r.yaml --shape 1,2": "--shape 1,2: give C,D,H,W",
    "plan r.yaml --memory lots": "--memory lots: give a size",
    "plan r.yaml --figure x.txt": "--figure x.txt: give a name that ends with .png",
    "plan r.yaml --machine nowhere": "there is no machine file nowhere",
    "plan r.yaml --machine a --calibrate b": "--calibrate and --machine both name a machine",
    "train r.yaml --machine nowhere": "there is no machine file nowhere",
    "train r.yaml --machine r.yaml": "r.yaml: 'settings' is missing, so it is not a machine file",
    "plan r.yaml --machine done": "cannot read the machine file done: Is a directory",
    "plan r.yaml --machine m-cut.yaml": "the machine file m-cut.yaml is not valid YAML",
    "plan r.yaml --machine m-key.yaml": "m-key.yaml: unknown key 'memori'",
    "train r.yaml --machine m-number.yaml": "bad value -1.0 for 'settings.0.bandwidth'",
    "sweep s.yaml --machine m-dtype.yaml": "'float33' is not a dtype: use float64, float32,",
    "scale strong r.yaml --ranks 1 --machine m-call.yaml": "'1.5' is not a list of whole",
    "plan r.yaml --calibrate m-device.yaml": "bad value 'gpu' for 'device': it should be 'cpu'",
    "calibrate --out m-key.yaml": "m-key.yaml: 'memory' is missing",
    "sweep s.yaml --machine nowhere": "there is no machine file nowhere",
    "scale strong r.yaml --ranks 1 --machine nowhere": "there is no machine file nowhere",
    "scale strong r.yaml --ranks 0": "--ranks 0: give different numbers",
    "scale strong r.yaml": "--ranks : give different numbers",
    "scale strong r.yaml --ranks 1 --axis up": "--axis up: give strong, and one of data, depth",
    "scale weak r.yaml --ranks 1 --axis depth": "--axis depth: give strong, and one of data,",
    "scale strong r.yaml --grid up=2": "--grid up=2: give AXIS=N, AXIS one of data, depth",
    "report run --control x=nowhere": "--control: there is no folder nowhere",
    "report run --json nowhere/x.json": "cannot write --json nowhere/x.json: No such file",
    "report run --figures gif": "--figures gif: choose from pdf, png",
    "report run --control x": "--control x: give NAME=FOLDER",
    "inspect empty grid.foo=2": "grid.foo=2: give grid.AXIS=N, AXIS one of data, depth",
    "inspect empty --format foo": "format='foo': choose from hdf5, lbann, npy,",
    "convert . out --cut 1,2": "--cut 1,2: give one number or three, D,H,W",
    "convert . out --format foo": "format 'foo': choose from hdf5, lbann, npy, tfrecord,",
    "convert . out --compression foo": "compression of hdf5: none, gzip, not foo",
    "convert . out --redshifts x": "--redshifts x: give numbers with commas, 0,0.5",
    "convert . out --channels middle": "'middle' is not one of 'first', 'last'",
    "convert lits . out --size x": "--size x: give one number or three, D,H,W",
    "convert scans . out --spacing x": "--spacing x: give one number or three, D,H,W",
    "simulate out --count 1 --size 8 --part 3/2": "--part 3/2: give K/N",
    "simulate out --count 0 --size 8": "'--count': Input should be greater than",
    "simulate out --count 1 --size 8 --parameters H0": "unknown parameter 'H0'; did you mean",
    "simulate out --count 1 --size 8 --ranges big": "ranges 'big': 'big' is neither wide, public",
    "simulate out --count 1 --size 8 --steps 0": "steps must be at least 1, not 0",
    "evaluate run --split mine": "'mine' is not one of 'test', 'validation', 'train', 'all'",
    "evaluate run --window x": "--window x: give one number or three, D,H,W",
    "evaluate run --window 0": "--window 0: give one number or three, D,H,W, above 0",
    "evaluate run --window 8 --overlap 1": "--overlap 1: give 0 <= overlap < 1",
    "convert scans . out --spacing 1,0,1": "--spacing 1,0,1: give one number or three, D,H,W,",
    "convert scans . out --spacing 1,nan,1": "--spacing 1,nan,1: give one number or three, D,H,W,",
    "evaluate run --overlap 0.5": "--overlap and --blend need windows: give --window D,H,W",
    "predict run a --out b --format png": "'png' is not one of 'nifti', 'hdf5', 'zarr'",
    "predict run a --out b --window 8 --blend linear": "'linear' is not one of 'gaussian',",
    # recipes
    "train r.yaml x": "'x' is not an override: write key=value",
    "train r.yaml epoch=1": "override epoch=: unknown key 'epoch'\n    nearest: 'epochs'",
    "train r.yaml epochs=x": "override epochs=: bad value 'x' for 'epochs'",
    f"train r.yaml seed={2**63}": f"bad value {2**63} for 'seed': it should be less than {2**63}",
    "train r.yaml data.synthetic.samples=10000001": "it should be less than or equal to 10000000",
    "train r.yaml data.window=[5,1]": "'data.window': it should be two numbers, the lower first",
    "train r.yaml data.repeat=1000001": "'data.repeat': it should be less than or equal to 1000000",
    "train r.yaml output=''": "bad value '' for 'output': it should be a path",
    "train r.yaml output=5": "bad value 5 for 'output': it should be a path",
    "plan r.yaml loss=dice": "loss=dice does not go with model.name=cosmoflow: use one of mse, l1",
    "train r.yaml data.path=empty": "(volumes made in memory) is needed, and both are",
    "train r.yaml data.fold=1": "data.fold and data.folds go together",
    "train r.yaml data.multiple=4 data.transform=mean": "data.multiple changes the mean by which",
    "train r.yaml data.window=[0,1] data.transform=mean": "are two transforms; give one of them",
    "train r.yaml model.target=nowhere.Net": "model.target nowhere.Net cannot be imported: ",
    "train r.yaml model.target=os": "model.target os cannot be imported: write package.Class",
    "train r.yaml model.target=nets.Nett": "cannot be imported: nets has no 'Nett'\n    nearest: "
    "nets.Net",
    "plan r.yaml loss.target=torch.nn.HuberLos": "torch.nn has no 'HuberLos'\n    nearest: "
    "torch.nn.HuberLoss",
    "plan r.yaml loss.target=nowhere.loss": "loss.target nowhere.loss cannot be imported: ",
    "train r.yaml optimizer.target=nowhere.Adam": "optimizer.target nowhere.Adam cannot be",
    "train r.yaml loggers=[{target: nowhere.Log}]": "loggers.0.target nowhere.Log cannot be",
    "train r.yaml optimizer.name=adamm": "'adamm' for 'optimizer.name': it should be one of adam,",
    "evaluate run epoch=1": "override epoch=: unknown key 'epoch'",
    "evaluate theirs": "model.target yaml.Net",
    "evaluate theirs --trust yaml.nodes": "model.target yaml.Net",
    "predict theirs a --out b": "model.target yaml.Net",
    # sweeps
    "sweep s.yaml epoch=1": "override epoch=: unknown key 'epoch'",
    "sweep no_rates.yaml": "'rates' is missing",
    "sweep variant.yaml": "unknown key 'model.widht'",
    "sweep s.yaml model.width=64": "s.yaml, variant 'a': data.synthetic holds volumes of [16, 16,",
}
"""Command lines that cannot run, and what is said of them."""

IN_FILES = {
    "train r.yaml --requeue": "--requeue: this is not a Slurm job (SLURM_JOB_ID is not set)",
    # what headers say
    "inspect truncated": "_000001.hdf5: cannot be read as",
    "inspect keys": "keys/a.hdf5: ",
    "inspect cut": "cut/v1.npy: ",
    "inspect bare": "bare: ",
    "inspect records": "records/a.tfrecord: ",
    "inspect zarr": "zarr/a.zarr: ",
    "inspect scans": "volume-0",
    "inspect good --format npy": "good",
    "inspect d.yaml data.targets=[x]": "parameter 'x' is not there",
    "convert truncated out": "_000001.hdf5: cannot be read as",
    "convert keys out": "keys/a.hdf5: ",
    "convert good good/out": "one lies in the other",
    "convert good out --cut 17": "17",
    "convert good out --subvolumes 5": "every extent has to be a multiple of it",
    "convert good out --redshifts 7": "redshift 7",
    "convert good out --format tfrecord --targets x": "parameter 'x' is not there",
    "convert lits scans out --size 8": "volume-0",
    "convert scans scans out --spacing 1": "volume-0",
    "train d.yaml data.path=truncated": "_000001.hdf5: cannot be read as",
    "train d.yaml data.path=keys": "keys/a.hdf5: ",
    "train d.yaml data.path=small": "volumes of [8, 8, 8] voxels but the model takes [16, 16",
    "train d.yaml data.path=two": "no volume for split 'train'",
    "train d.yaml data.targets=[x]": "parameter 'x' is not there",
    "train wide.yaml data.subvolume=5": "every extent has to be a multiple of it",
    "train d.yaml data.counts=[20,1,1]": "but there are 12",
    "train d.yaml model={name: unet3d, levels: 2} loss=dice": "parameters and no classes",
    "train wide.yaml data.path=small grid.depth=9": "_000000.hdf5: cannot cut volumes of 8 voxels",
    "train r.yaml data.counts=[200,1,1]": "but there are 128",
    "train r.yaml output=broken --resume": "none of the 1 checkpoints in broken/checkpoints is",
    "train r.yaml output=done data.batch_size=2 --resume": "data.batch_size is 2 but done",
    "train r.yaml output=done --resume": "the training split is not the one that done/checkpoints",
    "plan d.yaml data.path=truncated": "_000001.hdf5: cannot be read as",
    "plan d.yaml data.path=small": "volumes of [8, 8, 8] voxels but the model takes [16, 16",
    "scale strong d.yaml --ranks 1 data.path=truncated": "_000001.hdf5: cannot be read as",
    "sweep sd.yaml": "variant 'b': cannot cut odd/univ_ics_000000.hdf5 of 18 x 18 x 18 voxels",
    "evaluate done data.synthetic=null data.path=truncated": "_000001.hdf5: cannot be read as",
    "evaluate done data.synthetic=null data.path=small": "CosmoFlow 'lbann' takes no width 8",
    "evaluate done --calibrate --split all": "so the all split says nothing about them",
    "evaluate done --window 8": "windows are for networks that give voxels classes",
    "evaluate broken": "checkpoints/step-00000001 is not a complete checkpoint: No such file",
    "evaluate done --checkpoint good": "good is not a complete checkpoint: No such file",
    "predict broken a --out b": "step-00000001 is not a complete checkpoint: No such file",
    "evaluate torn": "is corrupt: model.safetensors is missing",
    "predict torn a --out b": "is corrupt: model.safetensors is missing",
    "predict done a b --out c": "2 of 2 inputs failed\n    a does not exist\n",
    "predict done truncated/univ_ics_000001.hdf5 --out b": "1 of 1 inputs failed",
    "predict done small --out b": "has 8 x 8 x 8 voxels but the network was trained on 16 x 16 x",
    "predict done single --out b": "has 1 channels but the network was trained on 4",
    "predict done scans/volume-0.nii --out b": "this network takes .hdf5, .h5, .zarr, .npy, .npz",
    "predict mapped scans/volume-0.nii --out b": "this network takes .hdf5, .h5, .zarr, .npy,",
    "predict done empty --out b": "to predict in it or below",
    "predict done good --out b --window 8": "windows are for networks that give voxels classes",
    "predict done good --out b --format zarr": "zarr is a format of masks; this network gives",
    "predict scanned scans --out b": "1 of 1 inputs failed\n    scans/volume-0.nii: cannot be read",
    "report run done torn": "run/evaluation/metrics.json is not there: this page compares",
    "predict nowhere a --out b --window 8": "nowhere is not the folder of a run",
    "report broken": "broken/evaluation/metrics.json cannot be read as JSON",
    "simulate good --count 1 --size 8": "univ_ics_000000.hdf5 was made with ",
}
"""Command lines that go wrong once files are opened."""


MACHINE = """\
name: here
date: 2026-11-29
versions: {}
processor: none
device: cpu
ranks_per_node: 2
ranks_per_socket: 2
memory: 8000000000
settings:
- ranks: 1
  flops: {float32: 1.0e+11}
  bandwidth: 1.0e+10
  operators:
  - {call: 'aten.relu.default(f32[1,2])', seconds: 0.001}
"""
SHAPE = {"$tuple": [4, 16, 16, 16]}
UNIVERSES = {
    "shape": SHAPE,
    "whole": SHAPE,
    "classes": {"$tuple": []},
    "parameters": {"names": ["a"], "centre": [0.0], "scale": [1.0], "misfit": {"$float": "nan"}},
}


def checkpoint(run: str, *missing: str, **extra: object) -> dict[str, str]:
    """The texts of a checkpoint's files; tensors are ``missing``."""
    state = json.dumps({"model": {}, "optimizer": None, "extra": extra})
    sums = {"state.json": sha256(state.encode()).hexdigest(), **dict.fromkeys(missing, "0" * 64)}
    folder = f"{run}/checkpoints/step-00000001"
    manifest = json.dumps({"format": 2, "sha256": sums})
    return {f"{folder}/state.json": state, f"{folder}/manifest.json": manifest}


@pytest.fixture
def _odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with recipes, runs and sweeps."""
    monkeypatch.chdir(tmp_path)
    text = "data: {synthetic: {width: 16}, batch_size: 4}\nmodel: {variant: lbann}\ndevice: cpu\n"
    files = {
        "bad.yaml": "a: [1\n",
        "unet.yaml": "data: {synthetic: {width: 16, classes: 2}, batch_size: 2}\n"
        "model: {name: unet3d, levels: 5}\nloss: dice\ndevice: cpu\n",
        "data.yaml": "data: {path: nowhere, batch_size: 2}\ndevice: cpu\n",
        "r.yaml": text,
        "run/recipe.yaml": text,
        "done/recipe.yaml": text,
        **checkpoint("done", batch_size=4, samples="of another split", about=UNIVERSES),
        "mapped/recipe.yaml": "data: {path: gone, keys: {volume: x, targets: y}, batch_size: 4}\n"
        "model: {variant: lbann}\ndevice: cpu\n",
        **checkpoint("mapped", about=UNIVERSES),
        "torn/recipe.yaml": text,
        **checkpoint("torn", "model.safetensors"),
        "scanned/recipe.yaml": text,
        **checkpoint("scanned", about={**UNIVERSES, "classes": ["background", "organ"]}),
        "broken/recipe.yaml": text,
        "broken/checkpoints/step-00000001/state.json": "",
        "broken/evaluation/metrics.json": "[",
        "d.yaml": "data: {path: good, batch_size: 2}\nmodel: {variant: lbann, width: 16}\n"
        "device: cpu\n",
        "sd.yaml": "recipe: d.yaml\nvariants: {a: {}, b: {model.width: null, data.subvolume: 16, "
        "data.path: odd}}\nrates: [0.1]\nseeds: [1]\n",
        "wide.yaml": "data: {path: good, batch_size: 2}\nmodel: {target: nets.Net}\ndevice: cpu\n",
        "theirs/recipe.yaml": text.replace("{variant: lbann}", "{target: yaml.Net}"),
        "theirs/epochs.csv": "",
        "s.yaml": "recipe: r.yaml\nvariants: {a: {}}\nrates: [0.1]\nseeds: [1]\n",
        "no_rates.yaml": "recipe: r.yaml\nvariants: {a: {}}\nseeds: [1]\n",
        "variant.yaml": "recipe: r.yaml\nvariants: {a: {model.widht: 16}}\nrates: [0.1]\n"
        "seeds: [1]\n",
        "empty/readme.txt": "no data",
        "arrays/a.npy": "",
        "m-cut.yaml": MACHINE[:-9],
        "m-key.yaml": MACHINE.replace("memory", "memori"),
        "m-number.yaml": MACHINE.replace("1.0e+10", "-1.0"),
        "m-dtype.yaml": MACHINE.replace("float32", "float33"),
        "m-call.yaml": MACHINE.replace("1,2", "1.5"),
        "m-device.yaml": MACHINE.replace("cpu", "gpu"),
        "nets.py": "import torch\n\n\nclass Net(torch.nn.Module): ...\n",
    }
    for name, words in files.items():
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(words)


@pytest.mark.usefixtures("_odd_files")
def test_what_is_wrong_is_said_before_torch_is_imported() -> None:
    check_said({**dict.fromkeys(HELP, ""), **WRONG}, "torch", "numpy", "h5py")


@pytest.mark.usefixtures("_odd_files")
def test_what_is_wrong_in_files_is_said_before_torch_is_imported() -> None:
    folders = {
        "good": (12, 16),
        "truncated": (3, 16),
        "small": (12, 8),
        "odd": (3, 18),
        "two": (2, 16),
    }
    for name, (count, width) in folders.items():
        for i in range(count):
            volume = counts(i, (width, width, width, 4))
            public(Path(name, f"univ_ics_{i:06}.hdf5"), volume, i)
    Path("single").mkdir()
    public(Path("single/a.hdf5"), counts(0, (16, 16, 16, 1)), 0)
    cut = Path("truncated/univ_ics_000001.hdf5")
    cut.write_bytes(cut.read_bytes()[:2000])
    for name in ("keys", "cut", "bare", "records", "scans", "zarr/a.zarr"):
        Path(name).mkdir(parents=True)
    write(Path("keys/a.hdf5"), density=np.zeros((8, 8, 8), np.float32))
    for file in ("cut/v0.npy", "cut/v1.npy", "bare/v0.npy"):
        np.save(file, np.zeros((1, 8, 8, 8), np.float32))
    Path("cut/v1.npy").write_bytes(Path("cut/v1.npy").read_bytes()[:200])
    Path("cut/targets.csv").write_text("name,a\nv0,1\nv1,2\n")
    Path("records/a.tfrecord").write_bytes(b"no record at all")
    Path("zarr/a.zarr/zarr.json").write_text("{")
    for file in ("scans/volume-0.nii", "scans/segmentation-0.nii"):
        Path(file).write_bytes(b"x" * 400)
    check_said(IN_FILES, "torch")


def check_said(lines: dict[str, str], *unwanted: str) -> None:
    """All commands one after the other in one process, each with its own standard error."""
    split = [re.split(r" (?![^{]*})", words) for words in lines]
    program = f"""
import io, sys
from contextlib import redirect_stderr, redirect_stdout
import hyperslab.cli
for words in {split!r}:
    sys.argv[1:] = words
    with redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()):
        try:
            hyperslab.cli.main()
        except SystemExit as end:
            code = end.code
    print([code, said.getvalue(), *({set(unwanted)!r} & sys.modules.keys())])
"""
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    for (words, said), (code, text, *imported) in zip(lines.items(), found, strict=True):
        assert said in text, words
        assert (imported, code in ((1, 2) if said else (0, None))) == ([], True), (words, code)


def test_a_machine_without_a_gpu_is_known_by_its_drivers_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert not machine_has_gpu(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert machine_has_gpu(tmp_path)
    recipe = load_recipe(ROOT / "recipes/demo.yaml", ["device=cuda"])
    monkeypatch.setattr(rank, "torch_knows_cuda", lambda: True)
    monkeypatch.setattr(rank, "machine_has_gpu", lambda: False)
    with pytest.raises(LayoutError, match="device=cuda: there is no CUDA device on this machine"):
        rank.check_ranks(recipe, None)


def test_a_torch_without_cuda_is_known_by_its_text() -> None:
    assert torch_knows_cuda() == (torch.version.cuda is not None or torch.version.hip is not None)


@pytest.mark.parametrize(
    "module", ["torch.nn", "torch.nn.functional", "torch.optim", "hyperslab.losses", "json"]
)
def test_what_is_there_is_not_refused_by_a_modules_text(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in dir(import_module(module)) if not name.startswith("_")]
    monkeypatch.delitem(sys.modules, module)  # as before it is imported
    for name in names:
        check_exists(f"{module}.{name}", "model.target", Trust(own=True))
    with pytest.raises(RecipeError, match="has no 'Nope'"):
        check_exists(f"{module}.Nope", "model.target", Trust(own=True))


def test_what_options_say_without_imports_is_what_there_is() -> None:
    assert set(FIGURE_FORMATS) == set(FigureFormat)
    assert get_args(get_type_hints(scale_command)["kind"]) == tuple(ScalingKind)
    defaults = {
        one.name: one.default for name in ("train", "evaluate") for one in load_command(name).params
    }
    assert defaults["profile_steps"] == ProfilePolicy().steps
    assert defaults["tolerance"] == SURFACE_TOLERANCE


def test_versions_are_those_of_the_libraries() -> None:
    assert current_versions()["torch"] == torch.__version__


def test_the_package_imports_nothing_until_it_is_used() -> None:
    (found,) = modules_after("import hyperslab")
    assert found.intersection((*SLOW, "typer", "jinja2")) == set()


def test_what_imports_torch_imports_what_it_uses() -> None:
    """One after the other in one process: cut tensors, the public names, training."""
    rules, names, training = modules_after(
        "import hyperslab.tensor.sharded",
        "import hyperslab as hs\nhs.shard, hs.parallelize, hs.open, hs.load, hs.models",
        "import hyperslab.cli.train, hyperslab.launch.restarts, hyperslab.train.run",
    )
    assert "hyperslab.ops.convolution" in rules, "a program that cuts a tensor has the rules"
    pages = {"matplotlib", "jinja2", "tensorboard", "triton"}
    assert names & {*pages, "pydantic", "rich", "typer"} == set()
    assert training & {*pages, "rich.progress", "hyperslab.planner.machine"} == set()


@pytest.mark.parametrize(
    "words", ["report run", "scale strong r.yaml --ranks 1", "plan r.yaml --figure f.png"]
)
def test_what_draws_says_what_it_lacks(words: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "data: {synthetic: {width: 16}, batch_size: 2}\nmodel: {variant: lbann}\n"
        "device: cpu\noutput: run\n"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("seed: 1\n")
    program = f"""
import sys
sys.modules["matplotlib"] = None
sys.argv[1:] = {words.split()!r}
import hyperslab.cli
hyperslab.cli.main()
"""
    with forked_commands():
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
        )
    assert done.returncode == 1
    assert re.search(r"error: drawing needs another library .*matplotlib", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_the_first_sentence_of_its_help(name: str) -> None:
    help_text = inspect.cleandoc(load_command(name).help).replace("\n", " ")
    assert re.split(r"(?<=\.) |  ", help_text)[0].strip() == COMMANDS[name]


def test_every_module_of_a_command_is_in_the_table() -> None:
    shared = {"__init__", "done", "options", "rank", "terminal"}
    folder = Path(inspect.getfile(load_command)).parent
    assert {file.stem for file in folder.glob("*.py")} - shared == set(COMMANDS)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), letter=st.sampled_from("aeqxz_"))
def test_a_misspelt_key_is_refused(data: st.DataObject, letter: str) -> None:
    section, _, last = data.draw(st.sampled_from([*_fields()])).rpartition(".")
    at = data.draw(st.integers(0, len(last)))
    key = f"{section}.{last[:at]}{letter}{last[at:]}".lstrip(".")
    with pytest.raises(RecipeError) as error:
        load_recipe(ROOT / "recipes" / "demo.yaml", [f"{key}=1"])
    assert f"override {key}=: unknown key '{key}'\n" in str(error.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grid.depth=x", "'x' for 'grid.depth': it should be a valid integer, unable to parse"),
        ("ema=1", "1 for 'ema': it should be less than 1"),
        ("data.fold=-1", "-1 for 'data.fold': it should be greater than or equal to 0"),
        ("optimizer.eps=.nan", "nan for 'optimizer.eps': it should be a finite number"),
        ("optimizer.schedule.power=[]", "[] for 'optimizer.schedule.power': it should be a valid"),
        (
            "data.shape=[4,32,x,0]",
            "'x' for 'data.shape.2': it should be a valid integer, unable to",
        ),
        ("data.window=[0,.nan]", "nan for 'data.window.1': it should be a finite number"),
        ("model.variant=lban", "'lban' for 'model.variant': it should be one of paper2020, sc18,"),
        (
            "model.name=cosmo",
            "'cosmo' for 'model.name': it should be one of cosmoflow, multiscale, unet3d\n",
        ),
        (
            "optimizer.name=adamm",
            "'adamm' for 'optimizer.name': it should be one of adam, sgd, a",
        ),
        ("optimizer=adam", "'adam' for 'optimizer': it is a section of keys\n    valid in optimi"),
        ("optimizer.schedule.name=x", "'x' for 'optimizer.schedule.name': it should be one of lin"),
        ("loss=mae", "'mae' for 'loss': it should be one of mse, l1, gaussian, cross_entropy,"),
        ("metrics={a: mae}", "'mae' for 'metrics.a': it should be one of mse, l1, gaussian,"),
        ("loggers=[csv, x]", "'x' for 'loggers.1': it should be one of csv, tensorboard, wandb"),
        ("data.format=hdf", "'hdf' for 'data.format': it should be one of hdf5, lbann, npy,"),
        ("memory=recompue", "'recompue' for 'memory': it should be one of auto, none, tile, rec"),
    ],
)
def test_bad_values_are_refused(override: str, said: str) -> None:
    with pytest.raises(
        RecipeError, match=re.escape(f"override {override.split('=')[0]}=: bad value {said}")
    ):
        load_recipe(ROOT / "recipes" / "demo.yaml", [override])


def test_names_of_torch_are_read_without_importing_it() -> None:
    for section, home, base in (
        ("optimizer", torch.optim, torch.optim.Optimizer),
        ("optimizer.schedule", lr_scheduler, lr_scheduler.LRScheduler),
    ):
        classes = [
            name
            for name, one in vars(home).items()
            if isinstance(one, type) and issubclass(one, base) and one is not base
        ]
        public = [name for name in classes if name[0] != "_" and name != "_LRScheduler"]
        assert torch_classes(section) == {n.lower(): f"{home.__name__}.{n}" for n in public}


def test_missing_keys_and_keys_of_another_kind_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    for text, said in {
        "model: {}": "'data' is missing",
        "data: {synthetic: {width: 16}}": "'data.batch_size' is missing",
        "data: {synthetic: {width: 16}, batch_size: 1}\nmlperf: {org: a}": "'mlperf.platform' is",
        "data: {synthetic: {width: 16}, batch_size: 1}\nmodel: {name: unet3d, width: 3}\n"
        "loss: dice": "key 'model.width' does not go with the chosen model.name",
    }.items():
        recipe.write_text(text)
        with pytest.raises(RecipeError, match=re.escape(said)):
            load_recipe(recipe)


def test_names_are_found_where_type_checkers_see_them() -> None:
    """Packages have the names that they import for type checkers, and no other."""
    assert set(hs.__all__) <= set(dir(hs))
    for package in (hs, hs.comm, hs.data, hs.formats, hs.models):
        assert [name for name in package.__all__ if getattr(package, name, None) is None] == []
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            package.nonsense  # noqa: B018


def test_starts_take_a_fraction_of_a_second() -> None:
    """Ten times what is measured, on a machine that does other things, too."""
    before = os.times()
    modules_after(command("--help"))
    after = os.times()
    assert after.children_user - before.children_user < 2.0
