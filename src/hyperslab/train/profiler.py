"""Records the profile of some steps of a run, and writes it however the run ends.

`marks` names what a rank waits for and which layer runs: methods are replaced and hooks added
for the profiled steps only, and taken back afterwards. `StepRecorder` says when recording begins
and what is kept; `ProfiledTrainer` is a trainer with a recorder at the borders of its steps.
"""

from __future__ import annotations

import functools
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from hyperslab.comm import Grid
from hyperslab.comm.communicator import GroupCommunicator, PendingMessages
from hyperslab.comm.shared_memory import SharedChannels
from hyperslab.data.dataset import Prefetcher
from hyperslab.errors import reason
from hyperslab.train.flops import measure_peak
from hyperslab.train.profile import (
    LAYER_MARK,
    MARK,
    STEP_MARK,
    LayerTime,
    Profile,
    ProfiledRange,
    StepTimes,
    by_range,
    events_of,
    layer_times,
    profile_folder,
    profile_path,
    step_times,
    write_profile,
)
from hyperslab.train.step import StepResult, Vote
from hyperslab.train.trainer import Progress, Trainer

Method = Callable[..., Any]
"""Types a method as its class has it."""


@contextmanager
def marks(model: nn.Module) -> Iterator[None]:
    """Open marks around every wait of this process and every submodule of ``model``."""
    with ExitStack() as stack:
        for owner, name, label in MARKED_METHODS:
            stack.enter_context(_method_marked(owner, name, label))
        stack.enter_context(_layers_marked(model))
        yield


def _gradient_label(
    _own: SharedChannels, _x: object, _ranks: object, what: str, *_: object, **__: object
) -> str | None:
    # Other sums through shared memory are a communicator's, which has its mark.
    return f"{MARK}gradients:{what}" if what == "the average of the gradients" else None


MARKED_METHODS: tuple[tuple[type, str, Method], ...] = (
    (PendingMessages, "__init__", lambda own, _g, _s, _r, what: f"{MARK}halos:{id(own)}:{what}"),
    (PendingMessages, "wait", lambda own: f"{MARK}halos:{id(own)}:{own._what}"),
    (GroupCommunicator, "sum_in_place", lambda _own, _x, what: f"{MARK}statistics:{what}"),
    (SharedChannels, "all_reduce", _gradient_label),
    (SharedChannels, "average_shown", lambda _own, _sums, what, **_: f"{MARK}gradients:{what}"),
    (Prefetcher, "take", lambda *_: f"{MARK}data:a mini-batch"),
    (Trainer, "train_step", lambda *_: f"{MARK}framework:between operators"),
    (Progress, "record", lambda *_: f"{MARK}framework:the history"),
    (Vote, "result", lambda *_: f"{MARK}vote:the agreement about a step"),
)
"""Class, method, and what names the mark by the method's arguments; None is no mark."""


@contextmanager
def _method_marked(owner: type, name: str, label: Method) -> Iterator[None]:
    original: Method = owner.__dict__[name]

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        words = label(*args, **kwargs)
        with nullcontext() if words is None else record_function(words):
            return original(*args, **kwargs)

    setattr(owner, name, marked)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _layers_marked(model: nn.Module) -> Iterator[None]:
    """Put a mark around each submodule's forward."""
    open_marks: list[record_function] = []
    hooks = []
    for name, module in model.named_modules():
        if name:
            begin = functools.partial(_begin_layer, open_marks, f"{LAYER_MARK}{name}")
            hooks.append(module.register_forward_pre_hook(begin))
            end = functools.partial(_end_layer, open_marks)
            hooks.append(module.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while open_marks:  # of a forward pass that an error ended
            _end_layer(open_marks)


def _begin_layer(open_marks: list[record_function], label: str, *_: object) -> None:
    mark = record_function(label)
    mark.__enter__()
    open_marks.append(mark)


def _end_layer(open_marks: list[record_function], *_: object) -> None:
    open_marks.pop().__exit__(None, None, None)


log = logging.getLogger("hyperslab")


@dataclass(frozen=True, slots=True)
class ProfilePolicy:
    """Chooses the steps that are profiled: after ``warm_up`` others, ``steps`` of them."""

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
        """Say whether operators are recorded now."""
        return self._profiler is not None

    def begin_step(self) -> None:
        """A step begins now; `begin` and `end` of one are where the run's own clock has them."""
        if self.done:
            return
        if not self.recording and len(self.passed) >= self.policy.warm_up:
            self._start()
        if self.recording:
            self._opened += 1
            self._step = record_function(f"{STEP_MARK}{self._opened}")
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
            self.complete[f"{STEP_MARK}{self._opened}"] = number
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
                **_measured_steps(events, wanted),
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
            log.info("%s", profile_summary(profile, self.path))

    def _stop(self) -> list[ProfiledRange]:
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


def _measured_steps(
    events: list[ProfiledRange], wanted: dict[str, int]
) -> dict[str, list[StepTimes] | list[LayerTime] | list[str]]:
    """Return the parts of a profile that come from events of the ``wanted`` steps."""
    labels: list[str] = []
    chosen = [(wanted[e.name], e) for e in events if e.name in wanted and not e.on_device]
    if not chosen:
        return {"steps": [], "layers": [], "labels": labels}
    by_step = by_range([step for _, step in chosen], events)
    pairs = list(zip(chosen, by_step, strict=True))
    steps = [step_times(number, step, inside, labels) for (number, step), inside in pairs]
    begun = [e for (_, step), inside in pairs for e in inside if e.begin >= step.begin]
    return {"steps": steps, "layers": layer_times(begun, len(chosen)), "labels": labels}


def profile_summary(profile: Profile, path: Path) -> str:
    """Summarise a profile in a line."""
    median = profile.median
    if median is None:
        return f"no step was profiled: {profile.ended} before there was one ({path})"
    few = f", not {profile.wanted}: {profile.ended}" if profile.ended else ""
    return (
        f"profiled {len(profile.steps)} steps{few}; the rows explain {100 * median.covered:.1f} % "
        f"of {median.seconds:.3g} s\n    `hyperslab report` shows {path}"
    )


def empty_profile(grid: Grid, precision: str, peak: float | None) -> Profile:
    """Return a profile of this rank that holds nothing yet."""
    return Profile(
        rank=grid.rank,
        ranks=grid.size,
        grid=grid.extents,
        device=grid.device.type,
        precision=precision,
        torch=torch.__version__,
        peak=peak,
    )


class ProfiledTrainer(Trainer):
    """Trains as `Trainer`, with a `StepRecorder` at the borders of its steps."""

    def __init__(self, trainer: Trainer, policy: ProfilePolicy) -> None:
        """Takes the place of ``trainer``, which has not begun; every rank makes one.

        Profiles of an earlier start of the run are removed, with what was predicted for it.
        """
        super().__init__(
            trainer.recipe,
            trainer.grid,
            trainer.objective,
            data=trainer.data,
            validation=trainer.validation,
            test=trainer.test,
            progress=trainer.progress,
        )
        run = self.recipe.output
        if self.grid.is_main:
            for old in profile_folder(run).glob("*.json"):
                old.unlink()
        self.grid.barrier()  # or it might remove what another rank has just written
        peak = self.recipe.peak or measure_peak(self.grid.device, self.recipe.precision)
        self.progress.flops.measured(peak)
        about = empty_profile(self.grid, self.recipe.precision, peak)
        self.recorder = StepRecorder(
            policy, about, run, model=self.model, settle=self.progress.await_vote
        )

    def fit(self) -> None:
        """Train as `Trainer.fit`; however it ends, a profile is written."""
        with self.recorder:
            super().fit()

    def train_epoch(self) -> None:
        """Train as `Trainer.train_epoch`."""
        self.recorder.begin_step()
        self.clock.restart()
        super().train_epoch()
        # What has begun is no step: there is no mini-batch left.
        self.recorder.end_step(self.at.step + 1, keep=False)

    def record(self, done: StepResult, rate: float) -> None:
        """Record as `Trainer.record`; a step that wrote a checkpoint is not kept."""
        super().record(done, rate)
        every = self.recipe.checkpoint.every_steps
        recording = self.recorder.recording
        self.recorder.end_step(self.at.step, keep=every is None or self.at.step % every != 0)
        if not self.recorder.done:
            self.recorder.begin_step()
        elif recording:
            self.grid.barrier()  # the next step is not to wait for the profiles of others
        if recording or not self.recorder.done:
            self.clock.restart()  # neither to start the profiler nor to write is part of a step
