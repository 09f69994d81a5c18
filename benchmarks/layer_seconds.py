"""How long each layer's own operators take in a step, by the profiler."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from clock import slowest
from networks import Step

import hyperslab as hs
from hyperslab.train.profile import Profile, profile_path, read_profile
from hyperslab.train.profiler import ProfilePolicy, StepRecorder, empty_profile


def profile_of(step: Step, grid: hs.Grid, steps: int) -> Profile:
    """Of so many steps of this rank; all ranks call this."""
    with tempfile.TemporaryDirectory() as folder:
        about = empty_profile(grid, str(step.dtype), None)
        policy = ProfilePolicy(steps=steps)
        recorder = StepRecorder(
            policy, about, Path(folder), model=step.case.model, settle=lambda: None
        )
        with recorder:
            number = 0
            while not recorder.done:
                recorder.begin_step()
                step.run()
                number += 1
                recorder.end_step(number)
        return read_profile(profile_path(Path(folder), grid.rank))


def measure_layers(step: Step, grid: hs.Grid, names: Sequence[str]) -> dict[str, float]:
    """Seconds of forward and backward of the layers ``names``, of the slowest rank, each."""
    found: Counter[str] = Counter()
    for time in profile_of(step, grid, steps=2).layers:
        found[time.layer] += time.compute if time.stage != "optimizer" else 0.0
    distinct = list(dict.fromkeys(names))
    return dict(zip(distinct, slowest([found[n] for n in distinct], grid.device), strict=True))
