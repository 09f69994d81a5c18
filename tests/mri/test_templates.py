"""A real MRI of a head with its labels, Debian's mricron-data (tiers: no process; gloo ranks).

`make test-mri` fetches it; without it these are skipped. ``ch2`` is a T1 scan of one man (MNI's
Colin 27, 181 x 217 x 181 voxels of 1 mm), ``ch2bet`` his brain alone, ``aal`` has 116 regions of it
(Tzourio-Mazoyer et al. 2002), ``inia19`` is the brain of a macaque at 0.5 mm with more labels than
there may be classes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml

import hyperslab as hs
from hyperslab.formats.nifti.resample import blurred_linear, nearest
from hyperslab.geometry import Box
from hyperslab.recipe.load import load_recipe
from hyperslab.train.evaluate import ClassEvaluation, evaluate
from hyperslab.train.predict import predict
from hyperslab.train.run import train
from hyperslab.train.samples import WindowPolicy
from tests.formats.nifti.lists import save
from tests.formats.opening import source_of
from tests.formats.universes import Seat
from tests.ranks import run_ranks

nib = pytest.importorskip("nibabel", reason="the extra `medical` is not installed")

FOLDER = Path(os.environ.get("HYPERSLAB_MRI", "/usr/share/mricron/templates"))

pytestmark = pytest.mark.skipif(
    not (FOLDER / "ch2.nii.gz").exists(), reason="no mricron-data here: make test-mri fetches it"
)


@pytest.fixture(scope="module")
def scan() -> tuple[np.ndarray, np.ndarray]:
    """Values and labels (D, H, W), by nibabel alone."""
    images = (nib.load(FOLDER / f"{name}.nii.gz") for name in ("ch2", "aal"))
    values, labels = (np.asarray(image.dataobj).transpose(2, 1, 0) for image in images)
    return values, labels


def names() -> list[str]:
    """Of aal's regions."""
    rows = (FOLDER / "aal.nii.txt").read_text().splitlines()
    return [row.split()[1] for row in rows if row.strip()]


def whole_list(folder: Path) -> Path:
    """The scan and its labels where they are, as a list of the Decathlon's kind."""
    for name in ("ch2", "aal"):
        (folder / f"{name}.nii.gz").symlink_to(FOLDER / f"{name}.nii.gz")
    content = {
        "modality": {"0": "T1"},
        "labels": {str(i): name for i, name in enumerate(["background", *names()])},
        "training": [{"image": "./ch2.nii.gz", "label": "./aal.nii.gz"}],
    }
    path = folder / "dataset.json"
    path.write_text(json.dumps(content))
    return path


def test_a_head_and_its_116_regions(tmp_path: Path, scan: tuple[np.ndarray, np.ndarray]) -> None:
    path = whole_list(tmp_path)
    with pytest.raises(hs.DataError, match=r"dataset.json: training\[0\] refers to .*ch2.nii.gz"):
        source_of(path, Seat())
    with hs.open(path, Seat(), batch_size=1, split="all", outside_files=True) as data:
        source = data.source
        assert len(source.classes) == 117
        assert source.shape == (1, 181, 217, 181)
        assert source.voxel_size(0) == (1.0, 1.0, 1.0)
        for seat in Seat.all(depth=2, width=2):
            box = seat.partition((1, *source.shape)).box(seat.coords)
            inner = Box(box.lo[2:], box.hi[2:])
            read = source.read(0, Box(box.lo[1:], box.hi[1:]))[0]
            np.testing.assert_array_equal(read, scan[0][inner.slices()])
            np.testing.assert_array_equal(source.labels(0, inner), scan[1][inner.slices()])


def test_labels_of_the_macaque_are_no_classes(tmp_path: Path) -> None:
    rows = ["# classes: background, brain", "image,label"]
    rows.append(f"{FOLDER}/inia19-t1-brain.nii.gz,{FOLDER}/inia19-NeuroMaps.nii.gz")
    (tmp_path / "a.csv").write_text("\n".join(rows))
    data = hs.open(tmp_path / "a.csv", Seat(), batch_size=1, split="all", outside_files=True)
    with data, pytest.raises(hs.DataError, match=r"inia19-NeuroMaps\.nii\.gz.*are not classes"):
        list(data.epoch(0))


def test_images_and_labels_of_two_heads_are_refused(tmp_path: Path) -> None:
    rows = ["# classes: background, brain", "image,label"]
    rows.append(f"{FOLDER}/inia19-t1-brain.nii.gz,{FOLDER}/aal.nii.gz")
    (tmp_path / "a.csv").write_text("\n".join(rows))
    with pytest.raises(hs.DataError, match=r"aal.nii.gz: has \(181, 217, 181\) voxels"):
        hs.open(tmp_path / "a.csv", Seat(), batch_size=1, split="all", outside_files=True)


def parts(folder: Path, scan: tuple[np.ndarray, np.ndarray]) -> Path:
    """Four overlapping parts of the brain at 4 mm, each of a shape of its own, and its regions."""
    shape = tuple(extent // 4 for extent in scan[0].shape)
    brain = np.asarray(nib.load(FOLDER / "ch2bet.nii.gz").dataobj).transpose(2, 1, 0)
    values = blurred_linear(brain, shape)
    labels = (nearest(scan[1], shape) > 0).astype(np.uint8)
    rows = ["# classes: background, grey matter", "image,label,split"]
    crops = ((0, 0, "train"), (3, 5, "train"), (2, 0, "validation"), (0, 6, "test"))
    for number, (low, back, split) in enumerate(crops):
        inside = np.s_[low:, back : shape[1] - low, :]
        save(folder / f"{number}/t1.nii.gz", values[inside], (4.0, 4.0, 4.0))
        save(folder / f"{number}/mask.nii.gz", labels[inside], (4.0, 4.0, 4.0))
        rows.append(f"{number}/t1.nii.gz,{number}/mask.nii.gz,{split}")
    path = folder / "parts.csv"
    path.write_text("\n".join(rows))
    return path


def trained(recipe: Path, *overrides: str) -> ClassEvaluation:
    train(load_recipe(recipe, overrides))
    result = evaluate(load_recipe(recipe).output)
    assert isinstance(result, ClassEvaluation)
    return result


def test_grey_matter_is_learnt_on_two_ranks(
    tmp_path: Path, scan: tuple[np.ndarray, np.ndarray]
) -> None:
    values = {
        "model": {"name": "unet3d", "channels": 4, "levels": 2},
        "data": {
            "path": str(parts(tmp_path, scan)),
            "batch_size": 1,
            "multiple": 4,
            "window": [0, 130],
        },
        "loss": "dice_cross_entropy",
        "optimizer": {"learning_rate": 1e-2},
        "epochs": 12,
        "checkpoint": {"every": 20},
        "device": "cpu",
        "timeout": 60,
        "output": str(tmp_path / "run"),
    }
    recipe = tmp_path / "run.yaml"
    recipe.write_text(yaml.safe_dump(values))
    result = run_ranks(2, trained, recipe, "grid.depth=2")[0]
    assert result.classes == ("background", "grey matter")
    assert result.samples == ("3/t1",)
    assert result.scores["grey matter"]["dice"] > 0.5
    surface = result.surfaces["3/t1"]["grey matter"]
    assert surface.presence == "both"
    assert 0 < surface.average < 40, "millimetres"
    windows = WindowPolicy((24, 24, 24), 0.5)
    (outcome,) = predict(
        tmp_path / "run", [FOLDER / "ch2bet.nii.gz"], tmp_path / "out", windows=windows
    )
    assert outcome.state == "predicted"
    mask = nib.load(tmp_path / "out/ch2bet-mask.nii.gz")
    assert mask.shape == (181, 217, 181), "the lattice of the scan, not that of the training"
    found = np.asarray(mask.dataobj).transpose(2, 1, 0)
    brain = scan[1] > 0
    assert ((found > 0) & brain).sum() > 0.5 * brain.sum()
