"""Files of profiles: written, read, refused (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperslab.errors import DataError
from hyperslab.train.profile import (
    LayerTime,
    Profile,
    StepTimes,
    predicted_path,
    profile_path,
    read_profile,
    read_profiles,
    write_profile,
)


def test_read_back_by_rank(tmp_path: Path) -> None:
    steps = [
        StepTimes(step=i, seconds=s, rows={"halos": 0.25}, spans={"halos": [(0.0, 0.25, 0)]})
        for i, s in ((4, 1.0), (5, 3.0), (6, 2.0))
    ]
    profiles = [Profile(rank=r, ranks=11, steps=steps, labels=["a halo"]) for r in (0, 2, 10)]
    for profile in profiles:
        write_profile(profile_path(tmp_path, profile.rank), profile)
    layers = [LayerTime(layer="conv1", stage="forward", compute=0.5)]
    write_profile(predicted_path(tmp_path), Profile(kind="predicted", layers=layers))
    assert read_profiles(tmp_path) == profiles
    assert read_profile(predicted_path(tmp_path)).layers == layers
    assert profiles[0].median == steps[2]


def test_a_folder_without_profiles(tmp_path: Path) -> None:
    assert read_profiles(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "the file: Invalid JSON"),
        ('{"rank": "x"}', "rank: Input should be a valid integer"),
        ('{"version": 2}', "version: Input should be 1"),
        ('{"layers": [{"layer": "a", "stage": "sideways", "compute": 1}]}', "layers.0.stage"),
        ('{"stepps": []}', "stepps: Extra inputs"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = profile_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(DataError, match=rf"(?s)rank-0\.json is not a profile: {words}.*--profile"):
        read_profiles(tmp_path)
