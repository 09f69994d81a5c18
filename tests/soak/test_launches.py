"""Launches that nobody refuses, or not by name, are violations (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import launches
from tests.soak.campaign import Settings, Violation

FIRST = launches.KINDS[0]
BY_NAME = (1, f"error: the ranks differ in {FIRST}: 1 on rank 0, 2 on rank 1\n")


@pytest.mark.parametrize(
    ("ends", "fine"),
    [
        ([BY_NAME, BY_NAME], True),
        ([BY_NAME, (0, "")], False),
        ([BY_NAME, (1, "error: rank 0 is gone\n")], False),
        ([(0, ""), (0, "")], False),
    ],
)
def test_both_ranks_name_the_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[tuple[int, str]],
    fine: bool,
) -> None:
    monkeypatch.setattr(launches, "by_hand", lambda *_: ends)
    campaign = launches.Launches(Settings(0, 2, tmp_path))
    if fine:
        assert campaign.play(0).startswith(f"{FIRST}: refused by name after 0.0 s")
        return
    with pytest.raises(Violation, match=FIRST):
        campaign.play(0)


def test_each_kind_is_played() -> None:
    assert len({*launches.KINDS}) == len(launches.KINDS) >= 20
