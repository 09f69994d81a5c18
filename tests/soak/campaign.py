"""What a campaign is: cases of one kind of fault, each drawn from the seed and its number alone.

A new kind is a module with a `Campaign` and a line in `tests.soak.kinds`.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


class Violation(AssertionError):
    """Something that must hold does not."""


class Unavailable(Exception):
    """This kind of fault cannot be made here; says why."""


@dataclass(frozen=True)
class Settings:
    """What all campaigns of a soak are given; ``folder`` is a scratch folder of this one's own."""

    seed: int
    ranks: int
    folder: Path


class Campaign(ABC):
    """Cases of one kind of fault, with what has to hold in each.

    It is made once and plays many cases; making it raises `Unavailable` where its faults cannot be
    made, and a `Violation` where something goes wrong already then, with nothing left running.
    """

    weight: ClassVar[float] = 1.0
    """Its share of the time, next to the others'."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def play(self, number: int) -> str:
        """Play the case of this number; a line that says what it was and how it ended.

        Raises:
            Violation: something that must hold does not.
        """

    def summary(self) -> dict[str, Any]:
        """Figures of all cases so far, for the end."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End what it has started."""

    def rng(self, number: int) -> random.Random:
        """What a case draws from: the same in every soak with this seed."""
        return random.Random(f"{type(self).__name__}/{self.settings.seed}/{number}")


def patience(seconds: float) -> float:
    """How long to wait [s] for what is no part of a promise: longer where cores are shared.

    It may be asked again, as others come and go.
    """
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def must(holds: bool, words: str) -> None:
    """
    Raises:
        Violation: it does not hold.
    """
    if not holds:
        raise Violation(words)
