"""Curves of the report (tier: no process)."""

from __future__ import annotations

import numpy as np
import pytest

from hyperslab.studies.report.chapters import loss_by_step, running_median


@pytest.mark.filterwarnings("error")
def test_a_running_median_where_values_are_missing() -> None:
    nan = np.nan
    values = np.array([nan, nan, nan, nan, nan, 3.0, 1.0, 2.0])
    found = running_median(values, np.arange(8))
    assert found.tolist()[4:] == [2.0, 2.0, 2.0, 2.0]
    assert np.isnan(found[:3]).all()
    assert running_median(values, np.array([0, 6])).tolist()[1] == 2.0


def test_a_single_step_is_drawn() -> None:
    for count, marker in ((1, "o"), (40, "")):
        steps = {"step": np.arange(count) + 1.0, "loss": np.linspace(1, 0.5, count)}
        figure = loss_by_step(steps, measure="loss").figure
        assert figure is not None
        assert figure.axes[0].lines[0].get_marker() == marker
