"""How long a training stands still after a rank's death, by phases, and what it computes meanwhile.

    python benchmarks/restart.py [--ranks 2] [--turns 5] [--busy 0] [--json OUT]

A small training with a checkpoint a step runs with `--restarts`; in every turn a rank is killed by
SIGKILL some steps after the last start, and the clock runs until the history has a step that nobody
has computed before. The phases, in seconds, whose medians over the turns are printed with the
longest whole:

- *notice*: until the first of the other ranks has ended: it has seen that one is gone;
- *end*: until all have, and the launcher begins to start ranks;
- *start*: until all new ranks are there, as processes;
- *imports*: until rank 0 has imported, met the others, and takes hold of the run's folder;
- *load*: until rank 0 has opened the data and read the checkpoint;
- *step*: until the first new step is in the history.

*cpu* is what launcher and ranks have computed meanwhile [s]: on an idle machine the share of a core
that waits for nothing. ``--busy 3`` runs three processes a core beside it that never rest.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clock import processor

from hyperslab.util.optional_libraries import current_versions

RECIPE = """\
model: {name: unet3d, channels: 4, levels: 2}
data: {synthetic: {width: 16, samples: 16, channels: 1, classes: 3}, batch_size: 2}
loss: cross_entropy
device: cpu
epochs: 100000
checkpoint: {every: 100000, every_steps: 1}
"""

PHASES = ("notice", "end", "start", "imports", "load", "step")
STEPS = 15  # after a start, before the next kill
PATIENCE = 600.0  # [s]
LOOK = 0.005  # [s]
TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the medians of the phases."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the training
    turns: list[dict[str, float]] = []
    with _busy(options.busy), tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), options.ranks, options.turns)
        try:
            for turn in range(options.turns):
                found = training.restart(turn % options.ranks)
                turns.append(found)
                print("  ".join(f"{key} {value:.2f}" for key, value in found.items()), flush=True)
        finally:
            training.end()
    medians = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    medians["longest"] = max(turn["whole"] for turn in turns)
    print("median  " + "  ".join(f"{key} {value:.2f}" for key, value in medians.items()))
    if options.json is not None:
        facts = {
            "date": datetime.date.today().isoformat(),
            "system": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "versions": current_versions(),
            "options": {key: vars(options)[key] for key in ("ranks", "turns", "busy")},
        }
        rows = {"turns": turns, "median": medians}
        options.json.write_text(json.dumps({**facts, **rows}, indent=1) + "\n")


class Training:
    """Runs one, which starts again after every kill."""

    def __init__(self, folder: Path, ranks: int, restarts: int) -> None:
        self.ranks = ranks
        self.run = folder / "run"
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE)
        words = ["train", str(recipe), "--output", str(self.run), f"--restarts={restarts}"]
        self.output = (folder / "output").open("w+")
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "hyperslab", *words, f"--ranks={ranks}", f"grid.depth={ranks}"],
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        self.before = 0  # lines of the history when the ranks were started

    def restart(self, victim: int) -> dict[str, float]:
        """Kill a rank when it is time; returns the phases [s]."""
        self._until(lambda: self._lines() >= self.before + STEPS)
        old = self._ranks()
        computed = self._computed(old)
        os.kill(old[victim], signal.SIGKILL)
        killed = time.perf_counter()
        times = []
        others = [pid for pid in old if pid != old[victim]]
        times.append(self._until(lambda: not all(map(_runs, others))))
        times.append(self._until(lambda: self._said("restart ")))
        new: list[int] = []

        def started() -> bool:
            new[:] = [pid for pid in self._ranks() if pid not in old]
            return len(new) == self.ranks

        times.append(self._until(started))
        times.append(self._until(lambda: _holds(new[0], self.run / ".lock")))
        times.append(self._until(lambda: self._said("going on from")))
        self.before = self._lines()
        times.append(self._until(lambda: self._lines() > self.before))
        whole = times[-1] - killed
        spans = [end - begin for begin, end in itertools.pairwise([killed, *times])]
        cpu = self._computed(new) - computed
        self.output.truncate(0)
        return {**dict(zip(PHASES, spans, strict=True)), "whole": whole, "cpu": cpu}

    def end(self) -> None:
        self.launcher.terminate()
        self.launcher.wait()
        self.output.close()

    def _until(self, condition: Callable[[], bool]) -> float:
        deadline = time.perf_counter() + PATIENCE
        while not condition():
            if self.launcher.poll() is not None or time.perf_counter() > deadline:
                self.output.seek(0)
                sys.exit(f"the training does not get there:\n{self.output.read()}")
            time.sleep(LOOK)
        return time.perf_counter()

    def _lines(self) -> int:
        with suppress(OSError):
            return (self.run / "steps.csv").read_bytes().count(b"\n")
        return 0

    def _said(self, words: str) -> bool:
        return words in Path(self.output.name).read_text()

    def _ranks(self) -> list[int]:
        """Processes of the launcher's children that are ranks, in their order."""
        found = {}
        pid = self.launcher.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):
                for word in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    if word.startswith(b"RANK=") and _runs(int(child)):
                        found[int(word[5:])] = int(child)
        return [found[rank] for rank in sorted(found)]

    def _computed(self, ranks: list[int]) -> float:
        """Seconds of a processor that the launcher, these ranks and those before have had."""
        own = sum(map(int, _stat(self.launcher.pid)[11:15]))  # with those of children that ended
        return (own + sum(sum(map(int, _stat(pid)[11:13])) for pid in ranks)) / TICK


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _runs(pid: int) -> bool:
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def _holds(pid: int, file: Path) -> bool:
    with suppress(OSError):
        return any(os.readlink(link) == str(file) for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


@contextmanager
def _busy(each: int) -> Iterator[None]:
    """Processes that never rest, so many a core."""
    count = each * len(os.sched_getaffinity(0))
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="other processes a core")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
