"""A training whose processes are killed, frozen and stopped at random moments, from their start on.

One run after the other is trained on two ranks, interrupted over and over, and gone on with. What
has to hold is in the checks at the end.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.soak.campaign import Campaign, Settings, Unavailable, must, patience

RANKS = 2
LIMIT = 8.0  # [s] that a rank waits for the others
GONE = 10.0  # [s] until nobody is left
FROZEN = LIMIT + 30.0  # [s] until a frozen rank is named and all have ended
PATIENCE = 300.0  # [s] for what is no part of a promise, see `patience`
START = 8.0  # [s] that a start takes, more or less

RECIPE: dict[str, Any] = {
    "model": {"name": "unet3d", "channels": 4, "levels": 2},
    "data": {
        "synthetic": {"width": 16, "samples": 16, "channels": 1, "classes": 3},
        "batch_size": 2,
    },
    "loss": "cross_entropy",
    "kernels": "fixed",  # bit-equal
    "device": "cpu",
    "timeout": LIMIT,
    "epochs": 12,
    "checkpoint": {"every": 1, "every_steps": 2},
}

ORDERLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Fault:
    """Who gets which signal, so many seconds after it is there, or after so many steps."""

    victim: str  # launcher | guard | rank
    number: signal.Signals
    rank: int
    seconds: float | None
    steps: int

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.victim == "rank" else f"the {self.victim}"
        when = f"{self.steps} steps" if self.seconds is None else f"{self.seconds:.1f} s"
        return f"{self.number.name} to {who} after {when}"


def draw(rng: random.Random) -> Fault:
    """A sixth of the faults and more are during the start."""
    kills = [("launcher", signal.SIGKILL), ("rank", signal.SIGKILL), ("guard", signal.SIGKILL)]
    others = [("rank", signal.SIGSTOP), ("launcher", rng.choice(ORDERLY))]
    victim, number = rng.choice([*kills[:2], *kills, *others])
    seconds = rng.uniform(0, START) if rng.random() < 0.25 else None
    return Fault(victim, number, rng.randrange(RANKS), seconds, rng.randint(1, 12))


class Kills(Campaign):
    """Trainings of two ranks from interruption to interruption, to the undisturbed end."""

    weight = 2.0

    def __init__(self, settings: Settings) -> None:
        if sys.platform != "linux":
            raise Unavailable("it looks at processes in /proc")
        super().__init__(settings)
        self.recipe = settings.folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump({**RECIPE, "output": "given"}))
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.slowest = 0.0
        self.chain = 0
        self.group: int | None = None
        self.shared = set(shared_files())
        undisturbed = self.begin("undisturbed")
        try:
            self.wait(lambda: undisturbed.poll() is not None, None, "the undisturbed run")
        finally:
            undisturbed.kill()  # its ranks end with it
            words = undisturbed.communicate()
        must(undisturbed.returncode == 0, f"it ended so: {words}")
        self.expected = results(settings.folder / "undisturbed")

    @property
    def run(self) -> Path:
        return self.settings.folder / f"run-{self.chain}"

    def begin(self, name: str) -> subprocess.Popen[str]:
        words = [str(self.recipe), "--output", str(self.settings.folder / name), "--resume"]
        line = ["-m", "hyperslab", "train", *words, f"--ranks={RANKS}", f"grid.depth={RANKS}"]
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, *line], stdout=pipe, stderr=pipe, text=True)

    def play(self, number: int) -> str:
        fault = draw(self.rng(number))
        process = self.begin(self.run.name)
        try:
            words = self._strike(process, fault)
        finally:
            process.kill()
            _, errors = process.communicate()
        self._nobody_left(process.pid, words)
        must("Traceback" not in errors, errors)
        self.faults[f"{fault.number.name} to {fault.victim}"] += 1
        self.ends[words] += 1
        if words == "finished":
            must(results(self.run) == self.expected, "it differs from the undisturbed run")
            shutil.rmtree(self.run)
            self.chain += 1
        return f"{fault}: {words}"

    def _strike(self, process: subprocess.Popen[str], fault: Fault) -> str:
        """Wait for the moment, do it, and see how the training ends."""
        wanted = steps(self.run) + fault.steps

        def due() -> bool:
            there = find(process.pid, fault) is not None
            return there if fault.seconds is not None else steps(self.run) >= wanted

        self.wait(lambda: due() or process.poll() is not None, None, "the moment")
        time.sleep(fault.seconds or 0.0)
        newest = checkpoint(self.run)
        victim = find(process.pid, fault)
        if process.poll() is not None or victim is None:
            return self._end(process, None, 0)
        self.group = os.getpgid(victim)  # of the ranks, where it is not the launcher's own
        os.kill(victim, fault.number)
        words = self._after(process, fault)
        must(checkpoint(self.run) >= newest, f"the checkpoint {newest} has gone")
        return words

    def _after(self, process: subprocess.Popen[str], fault: Fault) -> str:
        match fault.victim, fault.number:
            case "launcher", signal.SIGKILL:
                process.wait()
                return "killed"
            case "guard", _:
                wanted = steps(self.run) + 2
                ended = process.poll
                self.wait(lambda: steps(self.run) >= wanted or ended() is not None, None, "it")
                process.terminate()
                return self._end(process, None, 128 + signal.SIGTERM)
            case "rank", signal.SIGKILL:
                return self._end(process, GONE, 1, f"rank {fault.rank}")
            case "rank", _:
                return self._end(process, FROZEN, 1, f"rank {fault.rank}")
        return self._end(process, None, 128 + fault.number)

    def _end(
        self, process: subprocess.Popen[str], seconds: float | None, code: int, named: str = ""
    ) -> str:
        """How the launcher ended, as it should or because the training was complete."""
        self.wait(lambda: process.poll() is not None, seconds, "its end")
        if process.returncode == 0:
            return "finished"
        assert process.stderr is not None
        errors = process.stderr.read()
        codes = (code, 128 - code)  # the second while it imports: the signal itself ends it
        must(process.returncode in codes, f"exit code {process.returncode}, not {code}: {errors}")
        must(named in errors and "Traceback" not in errors, f"{named} is not named: {errors}")
        return f"exit code {code}"

    def _nobody_left(self, launcher: int, words: str) -> None:
        begin = time.monotonic()
        left = ranks_of(launcher)
        self.wait(lambda: not ranks_of(launcher), GONE, f"the end of {left}, {words}")
        # None: no rank was struck yet.
        zombies = members(self.group) if self.group not in (None, os.getpgrp()) else []
        must(not zombies, f"zombies are left: {zombies}")
        self.slowest = max(self.slowest, time.monotonic() - begin)
        files = set(shared_files()) - self.shared
        must(not files, f"shared memory is left: {files}")

    def wait(self, condition: Callable[[], bool], promised: float | None, what: str) -> None:
        """Without seconds that are ``promised``, as long as a busy machine may need."""
        begin = time.monotonic()
        while not condition():
            seconds = patience(PATIENCE) if promised is None else promised
            must(time.monotonic() - begin < seconds, f"{what} did not come within {seconds:g} s")
            time.sleep(0.02)

    def summary(self) -> dict[str, Any]:
        return {
            "faults": dict(self.faults),
            "ends": dict(self.ends),
            "runs completed, bit-equal": self.chain,
            "slowest end after the launcher's [s]": round(self.slowest, 2),
        }


def steps(run: Path) -> int:
    history = run / "steps.csv"
    return len(history.read_text().splitlines()) if history.exists() else 0


def checkpoint(run: Path) -> str:
    """The name of the newest one."""
    return max((path.name for path in (run / "checkpoints").glob("step-*")), default="")


def results(run: Path) -> tuple[list[str], bytes]:
    """The loss of every step, and the weights."""
    rows = [line.split(",") for line in (run / "steps.csv").read_text().splitlines()]
    weights = run / "checkpoints" / checkpoint(run) / "model.safetensors"
    return [row[2] for row in rows], weights.read_bytes()


def find(launcher: int, fault: Fault) -> int | None:
    """The process id of the victim, if it is there already."""
    if fault.victim == "launcher":
        return launcher
    for pid in children(launcher):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if fault.victim == "guard" and b"guard.py" in line:
            return pid
        if fault.victim == "rank" and f"RANK={fault.rank}".encode() in environ:
            return pid
    return None


def children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def ranks_of(launcher: int) -> list[int]:
    """The processes that this launcher has started as ranks, and those that they have started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if f"HYPERSLAB_LAUNCHER={launcher}".encode() in environ:
            found.append(int(folder.name))
    return found


def members(group: int | None) -> list[int]:
    """The processes of a process group, zombies too."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(folder.name))
    return found


def shared_files() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("hyperslab-*")]
