"""Curves of the report (tier: no process)."""

from __future__ import annotations

import numpy as np
import pytest

from hyperslab.report.figures.learning import running_median


@pytest.mark.filterwarnings("error")
def test_a_running_median_where_values_are_missing() -> None:
    nan = np.nan
    values = np.array([nan, nan, nan, nan, nan, 3.0, 1.0, 2.0])
    assert running_median(values).tolist()[4:] == [2.0, 2.0, 2.0, 2.0]
    assert np.isnan(running_median(values)[:3]).all()
