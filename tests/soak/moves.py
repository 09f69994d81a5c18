"""Kills, freezes and signals at any moment, of a run that goes on on another grid each time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hyperslab.checkpoint.retention import latest
from tests.soak.campaign import Campaign, Settings, Unavailable, must, patience
from tests.soak.processes import alive_with, ranks_of

LIMIT = 6.0  # [s] the recipe's timeout
GONE = 10.0  # [s] until nobody may be alive any more
FROZEN = LIMIT + 30.0  # [s] the same after a rank was frozen
LOOK = 0.5  # [s] that a look at who is left takes at most, where nobody stops this process
PATIENCE = 240.0  # [s] for what only has to happen
STEPS = 48
TOLERANCE = 1e-4  # of losses on other grids, relative

RECIPE = """
data: {{synthetic: {{width: 16, samples: 20}}, batch_size: 2}}
model: {{variant: lbann}}
optimizer: {{learning_rate: 1e-4, eps: 1e-3}}
kernels: fixed
device: cpu
timeout: {limit}
epochs: 6
checkpoint: {{every_steps: {every}}}
output: {out}
"""

GRIDS: tuple[dict[str, int], ...] = (
    {"depth": 2},
    {"data": 2},
    {"height": 2},
    {"depth": 2, "width": 2},
    {},
)

DEEDS = ("kill rank", "kill rank", "kill launcher", "freeze rank", "pause rank", "stop", "kill all")


@dataclass(frozen=True)
class Blow:
    """What happens to one launch: after so many steps more, or so many seconds after its start."""

    deed: str
    grid: int
    steps: int
    seconds: float
    victim: int

    def __str__(self) -> str:
        when = (
            f"after {self.steps} steps" if self.steps else f"{self.seconds:.1f} s after the start"
        )
        return f"{self.deed} {when}"


class Moves(Campaign):
    """The run ends as the undisturbed one did, and nobody outlives a launch."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if sys.platform != "linux":
            raise Unavailable("it reads /proc")
        self.deeds: Counter[str] = Counter()
        self.at_start = 0
        self.slowest: dict[str, float] = {}
        self.farthest = 0.0

    def play(self, number: int) -> str:
        rng = self.rng(number)
        every = rng.choice([1, 3, 7])
        blows = [_draw(rng) for _ in range(rng.randint(2, 6))]
        folder = self.settings.folder / str(number)
        folder.mkdir()
        recipe, out = _recipe(folder, every)
        segments = {*Path("/dev/shm").glob("hyperslab-*")}
        for blow in blows:
            self._strike(blow, recipe, out, every)
        last = rng.randrange(len(GRIDS))
        with _Launch(recipe, GRIDS[last], folder / "last.txt") as launch:
            must(launch.process.wait(patience(PATIENCE)) == 0, f"the last launch: {launch.words()}")
        self._compare(out)
        must({*Path("/dev/shm").glob("hyperslab-*")} <= segments, "a segment was left")
        shutil.rmtree(folder)
        words = ", ".join(f"{blow} on {GRIDS[blow.grid] or 'one rank'}" for blow in blows)
        return f"checkpoint every {every} steps: {words}: as the undisturbed run"

    def _strike(self, blow: Blow, recipe: Path, out: Path, every: int) -> None:
        before = latest(out) if out.exists() else None
        begun = _steps(out)
        with _Launch(recipe, GRIDS[blow.grid], recipe.with_name("told.txt")) as launch:
            launch.until(out, begun, blow)
            done = launch.process.poll() is not None
            reached = _steps(out)
            deed = "ended before" if done else launch.do(blow)
            self.deeds[deed] += 1
            self.at_start += not done and reached == begun
            took = launch.ended(deed, recipe)
            self.slowest[deed] = max(self.slowest.get(deed, 0.0), took)
            launch.check_words(deed)
        after = latest(out) if out.exists() else None
        _check_kept(blow, before, after, reached, every)

    def _compare(self, out: Path) -> None:
        """With a run on one rank that nobody disturbed."""
        reference = self.settings.folder / "undisturbed"
        if not (reference / "run" / "steps.csv").exists():
            reference.mkdir()
            recipe, _ = _recipe(reference, STEPS)
            with _Launch(recipe, {}, reference / "told.txt") as launch:
                must(launch.process.wait(patience(PATIENCE)) == 0, f"undisturbed: {launch.words()}")
        ours, theirs = _losses(out), _losses(reference / "run")
        must(len(ours) == STEPS, f"{len(ours)} steps in the history and not {STEPS}")
        errors = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
        self.farthest = max(self.farthest, *errors)
        must(max(errors) < TOLERANCE, f"losses differ by {max(errors):.1e} at most")

    def summary(self) -> dict[str, Any]:
        return {
            "what was done": dict(sorted(self.deeds.items())),
            "farthest loss from the undisturbed one's, relative": self.farthest,
            "of it before the first step": self.at_start,
            "longest until all were gone [s]": {k: round(v, 1) for k, v in self.slowest.items()},
        }


def _draw(rng: Random) -> Blow:
    early = rng.random() < 0.35
    return Blow(
        rng.choice(DEEDS),
        rng.randrange(len(GRIDS)),
        0 if early else rng.randint(1, 14),
        rng.uniform(0, 8),
        rng.randrange(8),
    )


class _Launch:
    """`hyperslab train --resume` on a grid, and all of its processes."""

    def __init__(self, recipe: Path, grid: dict[str, int], told: Path) -> None:
        ranks = 1
        for extent in grid.values():
            ranks *= extent
        self.ranks, self.told = ranks, told
        axes = [f"grid.{axis}={extent}" for axis, extent in grid.items()]
        line = ["-m", "hyperslab", "train", str(recipe), "--ranks", str(ranks), "--resume", *axes]
        with told.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *line], stdout=file, stderr=subprocess.STDOUT
            )
        self.begun = time.monotonic()
        self.victim = 0

    def __enter__(self) -> _Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in ranks_of(self.process.pid).values():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def words(self) -> str:
        return self.told.read_text()[-3000:]

    def until(self, out: Path, begun: int, blow: Blow) -> None:
        """The moment, or the end of the run."""
        while self.process.poll() is None:
            waited = time.monotonic() - self.begun
            if (blow.steps and _steps(out) >= begun + blow.steps) or (
                not blow.steps and waited > blow.seconds
            ):
                return
            must(waited < patience(PATIENCE), f"{blow}: it does not get there\n{self.words()}")
            time.sleep(0.02)

    def do(self, blow: Blow) -> str:
        """What was done: to the launcher where there is no such rank, as of a run on one."""
        ranks = ranks_of(self.process.pid)
        if not ranks and blow.deed != "stop":
            self.process.kill()
            return "kill launcher"
        self.victim, pid = sorted(ranks.items())[blow.victim % len(ranks)] if ranks else (0, 0)
        try:
            match blow.deed:
                case "kill rank":
                    os.kill(pid, signal.SIGKILL)
                case "freeze rank":
                    os.kill(pid, signal.SIGSTOP)
                case "pause rank":
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(LIMIT / 4)
                    os.kill(pid, signal.SIGCONT)
                case "kill launcher":
                    self.process.kill()
                case "stop":
                    self.process.terminate()
                case "kill all":
                    for one in (self.process.pid, *ranks.values()):
                        os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            return "ended before"
        return blow.deed

    def ended(self, deed: str, recipe: Path) -> float:
        """How long it took until nobody was left [s], without pauses of the whole machine."""
        waited, last = 0.0, time.monotonic()
        bound = {"freeze rank": FROZEN, "pause rank": patience(PATIENCE), "stop": LIMIT + GONE}
        most = bound.get(deed, GONE)
        name = str(recipe)
        while left := alive_with(name):
            now = time.monotonic()
            waited += min(now - last, LOOK)
            last = now
            must(waited < most, f"{deed}: {left} alive after {waited:.0f} s\n{self.words()}")
            self.process.poll()
            time.sleep(0.05)
        return waited

    def check_words(self, deed: str) -> None:
        code, words = self.process.wait(), self.words()
        must("Traceback" not in words, f"{deed}: a traceback\n{words}")
        if deed in ("kill rank", "freeze rank"):
            must(code == 1, f"{deed}: exit code {code}\n{words}")
            must(f"error: rank {self.victim} (process" in words, f"{deed}: names none\n{words}")
        if deed == "pause rank":
            must(code == 0, f"{deed}: exit code {code}\n{words}")
        if deed == "stop":
            must(code in (0, -signal.SIGTERM, 128 + signal.SIGTERM), f"{deed}: {code}\n{words}")


def _check_kept(
    blow: Blow, before: Path | None, after: Path | None, reached: int, every: int
) -> None:
    """No checkpoint is lost, and the newest one is not older than the recipe says."""
    if before is not None:
        must(after is not None and after.name >= before.name, f"{blow}: {before} is lost")
    # A step is in the history when the one after it is under way: a checkpoint may be in between.
    due = (reached - 1) // every * every
    if due > 0:
        step = -1 if after is None else int(after.name[-8:])
        must(step >= due, f"{blow}: step {reached} was reached, the newest checkpoint is {step}")


def _recipe(folder: Path, every: int) -> tuple[Path, Path]:
    recipe, out = folder / "run.yaml", folder / "run"
    recipe.write_text(RECIPE.format(limit=LIMIT, every=every, out=out))
    return recipe, out


def _rows(out: Path) -> list[list[str]]:
    history = out / "steps.csv"
    lines = history.read_text().split("\n")[1:-1] if history.exists() else []
    return [line.split(",") for line in lines]


def _steps(out: Path) -> int:
    return len(_rows(out))


def _losses(out: Path) -> list[float]:
    return [float(row[2]) for row in _rows(out)]
