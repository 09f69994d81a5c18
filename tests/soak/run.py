"""Campaigns side by side: whose share of the time is smallest plays the next case."""

from __future__ import annotations

import shutil
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.campaign import Campaign, Settings, Unavailable, Violation


@dataclass
class Running:
    """A campaign on its way."""

    kind: str
    campaign: Campaign
    folder: Path
    number: int  # of the next case
    cases: int = 0
    seconds: float = 0.0

    @property
    def share(self) -> float:
        return self.seconds / self.campaign.weight

    def play(self) -> str:
        begin = time.monotonic()
        line = self.campaign.play(self.number)
        self.seconds += time.monotonic() - begin
        self.cases += 1
        self.number += 1
        return line


@dataclass
class Soak:
    """Cases of these kinds until the time or their number is up, or something is violated."""

    kinds: Mapping[str, type[Campaign]]
    seed: int
    ranks: int
    first: int = 0
    running: list[Running] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    violation: str | None = None
    begin: float = field(default_factory=time.monotonic)

    def run(self, minutes: float, cases: int) -> bool:
        """Whether nothing was violated; ``cases`` of each kind at most."""
        with ExitStack() as stack:
            for kind, made in self.kinds.items():
                if not self.violation:
                    self._start(kind, made, stack)
            while not self.violation and self._elapsed() < 60 * minutes:
                left = [one for one in self.running if one.cases < cases]
                if not left:
                    break
                self._play(min(left, key=lambda one: one.share))
        return self.violation is None

    def _start(self, kind: str, made: type[Campaign], stack: ExitStack) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"soak-{kind}-"))
        stack.callback(self._clear, folder)
        try:
            campaign = made(Settings(self.seed, self.ranks, folder))
        except Unavailable as reason:
            self.unavailable[kind] = str(reason)
            self._say(f"{kind}: left out, {reason}")
            return
        except Exception as error:
            self._violated(kind, self.first, folder, error)
            return
        stack.callback(campaign.close)
        self.running.append(Running(kind, campaign, folder, self.first))

    def _play(self, one: Running) -> None:
        try:
            line = one.play()
        except Exception as error:
            self._violated(one.kind, one.number, one.folder, error)
        else:
            self._say(f"{one.kind} {one.number - 1}: {line}")

    def _violated(self, kind: str, number: int, folder: Path, error: Exception) -> None:
        words = str(error) if isinstance(error, Violation) else traceback.format_exc()
        self.violation = f"{kind} {number}: {words}"
        self._say(f"VIOLATION {self.violation}\n{kind}: its files are in {folder}")
        self._say(
            f"to repeat: python -m tests.soak --kind {kind} --seed {self.seed} "
            f"--first {number} --cases 1 --ranks {self.ranks}"
        )

    def _say(self, words: str) -> None:
        print(f"{self._elapsed():7.1f} s  {words}", flush=True)

    def _clear(self, folder: Path) -> None:
        """What may explain a violation stays."""
        if self.violation is None:
            shutil.rmtree(folder, ignore_errors=True)

    def _elapsed(self) -> float:
        return time.monotonic() - self.begin

    def summary(self) -> dict[str, Any]:
        return {
            "minutes": self._elapsed() / 60,
            "violation": self.violation,
            "seed": self.seed,
            "ranks": self.ranks,
            "kinds": {
                one.kind: {"cases": one.cases, "minutes": one.seconds / 60} | one.campaign.summary()
                for one in self.running
            },
            "left out": self.unavailable,
        }
