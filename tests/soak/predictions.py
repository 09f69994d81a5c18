"""Predictions that are killed over and over and gone on with: the mask is the undisturbed one."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import zarr

from hyperslab.train.input_files import MASK_SUFFIXES
from tests.formats.convert.scans import numbers, write
from tests.soak.campaign import Campaign, Settings, Unavailable, must, patience
from tests.soak.kills import GONE, PATIENCE, START, ranks_of
from tests.train.predict.runs import write_segmentation

RANKS = 2
XYZ = (60, 56, 52)
BAND = 8  # layers that one move of the window completes
MOST_KILLS = 3


class Predictions(Campaign):
    """One scan in windows, cut over two ranks, in every format of masks."""

    def __init__(self, settings: Settings) -> None:
        if sys.platform != "linux":
            raise Unavailable("it looks at processes in /proc")
        super().__init__(settings)
        self.run = write_segmentation(settings.folder / "run")
        self.scan = write(settings.folder / "a.nii.gz", numbers(XYZ))
        self.kills: Counter[str] = Counter()
        self.masks = 0
        undisturbed = settings.folder / "undisturbed"
        self._to_the_end(undisturbed, "nifti")
        self.expected = digest(undisturbed, "nifti")

    def play(self, number: int) -> str:
        rng = self.rng(number)
        out = self.settings.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        format = rng.choice([*MASK_SUFFIXES])
        kills = [self._kill(rng, out, format) for _ in range(rng.randint(1, MOST_KILLS))]
        self._to_the_end(out, format)
        must(digest(out, format) == self.expected, f"after {kills} the {format} mask is another")
        # What a killed launch has said stays.
        left = sorted(path.name for path in out.iterdir() if path.name != "logs")
        must(left == [f"a{MASK_SUFFIXES[format]}", "predictions.jsonl"], f"there are {left}")
        self.kills.update(kill.partition(" after")[0] for kill in kills)
        self.masks += 1
        return f"{format}: {', '.join(kills)}"

    def _begin(self, out: Path, format: str) -> subprocess.Popen[str]:
        words = [str(self.run), str(self.scan), "--out", str(out), "--format", format, "--native"]
        grid = ["--window", "16,12,16", f"--ranks={RANKS}", f"grid.depth={RANKS}"]
        line = [sys.executable, "-m", "hyperslab", "predict", *words, *grid]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True)

    def _to_the_end(self, out: Path, format: str) -> None:
        process = self._begin(out, format)
        try:
            self._wait(lambda: process.poll() is not None, patience(PATIENCE), "its end")
        finally:
            process.kill()  # its ranks end with it
            words = process.communicate()
        must(process.returncode == 0, f"it ended so: {words}")

    def _kill(self, rng: random.Random, out: Path, format: str) -> str:
        """Kill the launcher or a rank, from its start on or once so many layers more are noted."""
        layers, seconds = BAND * rng.randrange(4), rng.uniform(0, START)
        victim = rng.choice(["launcher", *map(str, range(RANKS))])
        wanted = noted(out) + layers
        process = self._begin(out, format)

        def pid() -> int | None:
            return process.pid if victim == "launcher" else rank_of(process.pid, victim)

        def due() -> bool:
            return process.poll() is not None or (
                pid() is not None and noted(out) >= wanted and time.monotonic() > earliest
            )

        earliest = time.monotonic() + (0 if layers else seconds)
        try:
            self._wait(due, patience(PATIENCE), "the moment")
            if process.poll() is None and (struck := pid()) is not None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(struck, signal.SIGKILL)
            self._wait(lambda: process.poll() is not None, GONE, "its end")
        finally:
            process.kill()
            _, errors = process.communicate()
        must("Traceback" not in errors, errors)
        self._wait(lambda: not ranks_of(process.pid), GONE, "the end of its ranks")
        who = victim if victim == "launcher" else f"rank {victim}"
        return f"{who} after {layers} layers" if layers else f"{who} after {seconds:.1f} s"

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        begin = time.monotonic()
        while not condition():
            must(time.monotonic() - begin < seconds, f"{what} did not come within {seconds:g} s")
            time.sleep(0.02)

    def summary(self) -> dict[str, Any]:
        return {"kills": dict(self.kills), "masks, bit-equal": self.masks}


def noted(out: Path) -> int:
    """How many layers are done."""
    journal = out / "predictions.jsonl"
    text = journal.read_text() if journal.exists() else ""
    return max(map(int, re.findall(r'"layers": (\d+)', text)), default=0)


def rank_of(launcher: int, rank: str) -> int | None:
    for pid in ranks_of(launcher):
        with suppress(OSError):  # it ended meanwhile
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    return None


def digest(out: Path, format: str) -> str:
    """Of the classes (D, H, W)."""
    path = out / f"a{MASK_SUFFIXES[format]}"
    match format:
        case "hdf5":
            with h5py.File(path) as file:
                values = file["segmentation"][()]
        case "zarr":
            values = zarr.open_group(path, mode="r")["0"][:]
        case _:
            values = np.asarray(nibabel.load(path).dataobj).T
    return hashlib.sha256(np.ascontiguousarray(values, np.uint8).tobytes()).hexdigest()
