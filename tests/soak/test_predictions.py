"""A prediction that is killed and gone on with, and a mask that is another (tier: processes)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.campaign import Settings, Violation
from tests.soak.predictions import Predictions


@pytest.mark.long
def test_a_killed_prediction_ends_with_its_mask_and_another_one_is_found(tmp_path: Path) -> None:
    campaign = Predictions(Settings(3, 2, tmp_path))
    assert " after " in campaign.play(0)
    assert campaign.summary()["masks, bit-equal"] == 1
    campaign.expected = "another"
    with pytest.raises(Violation, match="mask is another"):
        campaign.play(0)
