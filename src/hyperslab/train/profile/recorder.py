"""Recording some steps of a run: when it begins, what is kept, what is written however it ends."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from hyperslab.comm import Grid
from hyperslab.errors import reason
from hyperslab.train.profile.events import STEP, Recorded, by_range, events_of
from hyperslab.train.profile.layers import layer_times
from hyperslab.train.profile.ranges import marks
from hyperslab.train.profile.rows import step_times
from hyperslab.train.profile.schema import (
    LayerTime,
    Profile,
    StepTimes,
    profile_path,
    write_profile,
)

log = logging.getLogger("hyperslab")


@dataclass(frozen=True, slots=True)
class ProfilePolicy:
    """Which steps are profiled: after ``warm_up`` others, ``steps`` of them."""

    warm_up: int = 3
    steps: int = 3


class StepRecorder:
    """Profiles steps of one rank's training, as a context; every rank has one.

    The first recorded step warms the profiler up and is left out. A profile is written as soon as
    it has its steps, and then nothing is left of it in the run; one that ends before says why.
    """

    def __init__(
        self,
        policy: ProfilePolicy,
        about: Profile,
        run: Path,
        *,
        model: nn.Module,
        settle: Callable[[], None],
    ) -> None:
        """``about`` says which rank of which run this is.

        ``settle`` waits for messages that are under way between steps: their ends are taken down
        by threads of torch, which must not find that the profiler has gone.
        """
        self.policy = policy
        self.about = about
        self.path = profile_path(run, about.rank)
        self.model = model
        self.settle = settle
        self.passed: list[float] = []  # times [s] of steps before, without the profiler
        self.complete: dict[str, int] = {}  # the numbers of steps by the names of their ranges
        self.done = False
        self._since: float | None = None
        self._step: record_function | None = None
        self._opened = 0
        self._profiler: torch.profiler.profile | None = None
        self._marks = ExitStack()

    @property
    def recording(self) -> bool:
        """Whether operators are taken down now."""
        return self._profiler is not None

    def begin_step(self) -> None:
        """A step begins now; `begin` and `end` of one are where the run's own clock has them."""
        if self.done:
            return
        if not self.recording and len(self.passed) >= self.policy.warm_up:
            self._start()
        if self.recording:
            self._opened += 1
            self._step = record_function(f"{STEP}{self._opened}")
            self._step.__enter__()
        self._since = time.perf_counter()

    def end_step(self, number: int, *, keep: bool = True) -> None:
        """The step that began last ends; ``keep`` is false if it did other things besides."""
        if self.done or self._since is None:
            return
        seconds = time.perf_counter() - self._since
        self._since = None
        if not self.recording:
            self.passed += [seconds] if keep else []
            return
        self._close_step()
        if keep:
            self.complete[f"{STEP}{self._opened}"] = number
        if len(self.complete) > self.policy.steps:
            self.finish(None)

    def _start(self) -> None:
        # It would greet and take leave of the terminal on every rank.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        kinds = [ProfilerActivity.CPU]
        if self.about.device == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        self._marks.enter_context(marks(self.model))
        self._profiler = torch.profiler.profile(activities=kinds)
        self._profiler.start()

    def _close_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def finish(self, ended: str | None) -> None:
        """Write what there is; ``ended`` says why there is not more.

        A profile that cannot be written does not end the training.
        """
        if self.done:
            return
        self.done = True
        events = self._stop()
        wanted = dict(list(self.complete.items())[1:])
        profile = self.about.model_copy(
            update={
                **_measured(events, wanted),
                "wanted": self.policy.steps,
                "usual_seconds": statistics.median(self.passed[1:] or self.passed or [0.0]) or None,
                "ended": ended,
            }
        )
        try:
            write_profile(self.path, profile)
        except OSError as error:
            log.warning("the profile %s cannot be written: %s", self.path, reason(error))
            return
        if profile.rank == 0:
            log.info("%s", words(profile, self.path))

    def _stop(self) -> list[Recorded]:
        """End the recording; what was recorded."""
        profiler = self._profiler
        if profiler is None:
            return []
        self._close_step()
        self._marks.close()
        self.settle()
        profiler.stop()
        self._profiler = None
        return events_of(profiler)

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        why = "the run ended" if error is None else (str(error) or type(error).__name__)
        self.finish(why.splitlines()[0])


def _measured(
    events: list[Recorded], wanted: dict[str, int]
) -> dict[str, list[StepTimes] | list[LayerTime] | list[str]]:
    """The parts of a profile that come from events of the ``wanted`` steps."""
    labels: list[str] = []
    chosen = [(wanted[e.name], e) for e in events if e.name in wanted and not e.on_device]
    if not chosen:
        return {"steps": [], "layers": [], "labels": labels}
    by_step = by_range([step for _, step in chosen], events)
    pairs = list(zip(chosen, by_step, strict=True))
    steps = [step_times(number, step, inside, labels) for (number, step), inside in pairs]
    begun = [e for (_, step), inside in pairs for e in inside if e.begin >= step.begin]
    return {"steps": steps, "layers": layer_times(begun, len(chosen)), "labels": labels}


def words(profile: Profile, path: Path) -> str:
    """What a profile says, in a line."""
    median = profile.median
    if median is None:
        return f"no step was profiled: {profile.ended} before there was one ({path})"
    few = f", not {profile.wanted}: {profile.ended}" if profile.ended else ""
    return (
        f"profiled {len(profile.steps)} steps{few}; the rows explain {100 * median.covered:.1f} % "
        f"of {median.seconds:.3g} s\n    `hyperslab report` shows {path}"
    )


def about_rank(grid: Grid, precision: str, peak: float | None) -> Profile:
    """A profile of this rank that holds nothing yet."""
    return Profile(
        rank=grid.rank,
        ranks=grid.size,
        grid=grid.extents,
        device=grid.device.type,
        precision=precision,
        torch=torch.__version__,
        peak=peak,
    )
