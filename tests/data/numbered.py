"""A source whose samples say who they are."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from hyperslab.data import Parameters, Source
from hyperslab.geometry import Box

HOW: Any = {"split": "all", "transform": None}
KEPT: Any = {**HOW, "mode": "store", "budget": 10**6}


class Numbered(Source):
    """Sample i is full of i; may come in another type, slowly, or not at all."""

    def __init__(self, count: int = 4, dtype: str = "int16", given: Any = None) -> None:
        self.names = [f"number {i}" for i in range(count)]
        self.shape, self.dtype = (1, 3, 4, 5), np.dtype(dtype)
        self.parameters = Parameters.normalised(["n"])
        self.given = given or dtype
        self.error: Exception | None = None
        self.pause = 0.0

    def read(self, sample: int, box: Box) -> Any:
        time.sleep(self.pause)
        if self.error is not None:
            raise self.error
        return np.full(box.shape, sample, self.given)

    def target(self, sample: int) -> Any:
        return np.array([sample], np.float64)


def own_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("hyperslab")]


def wait_for_threads() -> None:
    """They end when they have nothing to do; one that ends may have started another."""
    end = time.monotonic() + 10
    while threads := own_threads():
        assert time.monotonic() < end, threads
        threads[0].join(0.1)
