"""Cases of the campaign about checkpoints (tier: no process)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak import checkpoints
from tests.soak.campaign import Settings, Violation


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[checkpoints.Checkpoints]:
    found = checkpoints.Checkpoints(Settings(seed=1, ranks=1, folder=tmp_path))
    yield found
    found.close()


@pytest.mark.long
def test_nothing_is_lost_and_nothing_damaged_is_taken(campaign: checkpoints.Checkpoints) -> None:
    for number in range(40):
        campaign.play(number)
    assert campaign.summary()["ended"].keys() >= {"killed", "mutated and refused"}


def test_a_damaged_one_that_is_taken_is_a_violation(
    campaign: checkpoints.Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MUTATIONS", (checkpoints.gone,))
    monkeypatch.setattr(checkpoints, "latest", lambda run: None)
    monkeypatch.setattr(campaign, "_killed", campaign._mutated)
    with pytest.raises(Violation, match="is the newest"):
        play_all(campaign)


def play_all(campaign: checkpoints.Checkpoints) -> None:
    for number in range(20):
        campaign.play(number)
