"""Relative errors by the formula of a paper, from what an evaluation wrote (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from hyperslab.data.sampler import samples_of
from hyperslab.train.evaluate import Evaluation
from tests.studies.report.fake import NAMES
from tests.train.evaluate import test_evaluate
from tests.train.evaluate.test_evaluate import FRACTIONS, read

made = test_evaluate.made  # its fixtures
serial = test_evaluate.serial


def test_relative_errors_as_the_papers_formula(made: Path, serial: Evaluation) -> None:
    """|model - true| / model, and the same for always predicting the training split's mean."""
    files = sorted((made.parent / "universes").glob("*.hdf5"))
    trained = [files[i] for i in samples_of([f.stem for f in files], "train", FRACTIONS, 0)]
    physical = []
    for file in trained:
        with h5py.File(file) as content:
            physical.append(content["physPar"][()])
    mean = np.mean(physical, axis=0)
    rows = read(made)
    for i, name in enumerate(NAMES):
        pairs = [
            (float(row[f"predicted_phys_{name}"]), float(row[f"true_phys_{name}"])) for row in rows
        ]
        expected = np.mean([abs(model - true) / model for model, true in pairs])
        of_mean = np.mean([abs(mean[i] - true) / mean[i] for _, true in pairs])
        found = serial.errors[name]
        assert found["relative_error_sc18"] == pytest.approx(expected, rel=1e-6)
        assert found["relative_error_sc18_of_mean"] == pytest.approx(of_mean, rel=1e-6)
