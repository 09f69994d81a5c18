"""Cases of the campaign about what comes in (tier: a few gloo ranks)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak import inputs
from tests.soak.campaign import Settings, Violation


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[inputs.Inputs]:
    made = inputs.Inputs(Settings(seed=1, ranks=3, folder=tmp_path))
    yield made
    made.close()


def test_cases_are_taken_or_refused(campaign: inputs.Inputs) -> None:
    lines = [campaign.play(number) for number in range(20)]
    assert any("refused" in line for line in lines)
    assert any("taken" in line for line in lines)
    assert sum(campaign.summary()["faults"].values()) == 20


def test_what_is_taken_in_spite_of_a_fault_is_a_violation(
    campaign: inputs.Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "take", taken_always)
    with pytest.raises(Violation, match="refused by"):
        campaign.play(0)


def taken_always(_case: inputs.Case) -> tuple[bool, bool]:
    return False, True
