"""What a report says was learnt, and intervals of few samples (tier: no process)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.studies.configurations import read_comparison
from hyperslab.studies.report import write_report
from hyperslab.studies.report.accuracy import (
    fitted_band,
    learnt_parameters,
    learnt_words,
    ratios_of,
)
from hyperslab.studies.report.chapters import key_numbers
from hyperslab.studies.run_folder import read_run
from hyperslab.studies.table import DASH
from hyperslab.train.metrics import ConfidenceInterval
from tests.studies.report.compared import MEAN, columns, write_run
from tests.studies.report.fake import NAMES, fake_run


def test_ratios_are_those_of_plain_numpy_and_say_what_was_learnt(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "flat", seed=0, noise=1.0, shrink=0.05))
    ratios = ratios_of(run)
    true = columns(run.path / "evaluation" / "predictions.csv", "true")
    predicted = columns(run.path / "evaluation" / "predictions.csv", "predicted")
    expected = ((predicted - true) ** 2).mean(0) / ((true - MEAN) ** 2).mean(0)
    assert [ratios[name].value for name in NAMES] == pytest.approx(expected.tolist())
    assert learnt_parameters(ratios) != list(NAMES)
    run = read_run(write_run(tmp_path / "good", seed=0, noise=0.1))
    assert learnt_parameters(ratios_of(run)) == list(NAMES)
    (tile,) = [tile for tile in key_numbers(run) if tile.what == "Learnt"]
    assert tile.value == "4 of 4"


def test_the_sentence_tells_all_parameters_apart() -> None:
    ratios = {
        "sigma_8": ConfidenceInterval(0.143, 0.08, 0.25),
        "Omega_m": ConfidenceInterval(1.14, 0.9, 1.4),
        "n_s": ConfidenceInterval(1.3, 1.1, 1.6),
    }
    words = learnt_words(ratios).replace(DASH, "-")
    assert words.startswith("Learnt, with less error than predicting the mean: σ₈ 0.143 (0.0800")
    assert "Not distinguishable from predicting the mean: Ωₘ 1.14 (0.900 - 1.40)." in words
    assert "Worse than predicting the mean: nₛ 1.30 (1.10 - 1.60)." in words
    assert learnt_words({}) == ""


def test_another_split_than_the_test_says_nothing_and_is_not_compared(tmp_path: Path) -> None:
    path = write_run(tmp_path / "good", seed=0, noise=0.1)
    file = path / "evaluation" / "metrics.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "split": "train"}))
    assert ratios_of(read_run(path)) == {}
    page = write_report(path).read_text()
    assert "Normalised parameters of the train split" in page
    assert "test s" not in page
    other = write_run(tmp_path / "other", seed=1, noise=0.1)
    with pytest.raises(DataError, match="good/evaluation measured the train split, and this page"):
        read_comparison([path, other])


def test_too_few_volumes_or_no_mean_say_nothing(tmp_path: Path) -> None:
    assert ratios_of(read_run(fake_run(tmp_path, epochs=1))) == {}
    run = write_run(tmp_path / "few", seed=0, noise=0.1)
    for file in ("predictions.csv", "validation.csv"):
        path = run / "evaluation" / file
        path.write_text("\n".join(path.read_text().splitlines()[:4]) + "\n")
    assert ratios_of(read_run(run)) == {}


def test_the_band_of_the_line_narrows_with_samples_and_holds_the_line() -> None:
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, 400)
    y = 0.5 * x + 0.1 + random.normal(0, 0.2, 400)
    widths = []
    for count in (10, 400):
        band = fitted_band(x[:count], y[:count])
        assert band is not None
        places, lower, upper = band
        widths.append(float((upper - lower).mean()))
    fit = np.polyval(np.polyfit(x, y, 1), places)
    assert np.all((lower < fit) & (fit < upper))
    assert widths[1] < widths[0] / 3
    assert fitted_band(x[:4], y[:4]) is None
    assert fitted_band(np.ones(9), y[:9]) is None
