"""What `make demo-unet` does, small: phantoms, training, masks (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hyperslab.formats.convert.scans import convert_scans
from hyperslab.formats.nifti.source import find_pairs
from hyperslab.recipe.load import load_recipe
from hyperslab.simulate.phantoms import make_phantoms
from hyperslab.studies.report import write_report
from hyperslab.train.evaluate import ClassEvaluation, evaluate
from hyperslab.train.predict import predict
from hyperslab.train.run import train
from tests.formats.convert.scans import nib
from tests.ranks import run_ranks

RECIPE = Path(__file__).parents[2] / "recipes" / "demo-unet.yaml"
COUNT = 6


def demo(folder: Path) -> float:
    """Train, evaluate and predict, as this rank; the liver's Dice."""
    overrides = [
        f"data.path={folder / 'phantoms'}",
        f"output={folder / 'run'}",
        "model.channels=4",
        "epochs=1",
        "data.fractions=[0.6, 0.2, 0.2]",
    ]
    train(load_recipe(RECIPE, overrides))
    result = evaluate(folder / "run", overrides=["grid.depth=2"])
    assert isinstance(result, ClassEvaluation)
    inputs = [folder / "phantoms" / "nifti"]
    outcomes = predict(folder / "run", inputs, folder / "masks", overrides=["grid.depth=2"])
    assert [outcome.state for outcome in outcomes] == ["predicted"] * COUNT
    return result.scores["liver"]["dice"]


@pytest.mark.usefixtures("undrawn")
def test_from_phantoms_to_masks_that_lie_where_they_do(tmp_path: Path) -> None:
    nifti = tmp_path / "phantoms" / "nifti"
    make_phantoms(nifti, COUNT, slices=16, width=16)
    convert_scans(find_pairs(nifti), tmp_path / "phantoms", shape=(16, 16, 16))
    dice = run_ranks(2, demo, tmp_path)
    assert dice[0] == dice[1]
    assert not math.isnan(dice[0])
    for pair in find_pairs(nifti):
        scan = nib.load(pair.image)
        mask = nib.load(tmp_path / "masks" / f"{pair.name}-mask.nii.gz")
        np.testing.assert_array_equal(mask.affine, scan.affine)
        assert mask.shape == scan.shape
        assert set(np.unique(np.asarray(mask.dataobj))) <= {0, 1, 2}
    page = write_report(tmp_path / "run").read_text()
    assert page.count("Across depth") == 1, "one phantom was kept for the test"
