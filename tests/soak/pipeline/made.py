"""The data sets of a round: their values from the seed alone, as files and as a `Source`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

import hyperslab as hs
from hyperslab.data import Parameters, Source
from hyperslab.geometry import Box
from tests.formats.universes import write
from tests.soak.pipeline.plan import Part, Plan

CLASSES = ("air", "bone", "skin")
P = 3  # parameters
LONG = 2  # a source that is late sleeps so many time limits


def volume(part: Part, sample: int) -> NDArray[Any]:
    """(C, D, H, W)"""
    rng = np.random.default_rng((part.seed, sample))
    if part.dtype == "float32":
        return rng.normal(0, 100, part.shape).astype("float32")
    low = -1000 if part.labelled and part.dtype == "int16" else 0
    return rng.integers(low, np.iinfo(part.dtype).max, part.shape).astype(part.dtype)


def rest(part: Part, sample: int) -> NDArray[Any]:
    """Labels (D, H, W) or targets (P,)"""
    rng = np.random.default_rng((part.seed, sample, 1))
    if part.labelled:
        return rng.integers(0, len(CLASSES), part.shape[1:]).astype("uint8")
    return rng.normal(size=P)


def make(part: Part, folder: Path, nan: int = -1) -> None:
    """Write the files; with a NaN in the middle of one sample."""
    folder.mkdir(parents=True)
    for sample, name in enumerate(part.names):
        values, found = volume(part, sample), rest(part, sample)
        if sample == nan:
            _spoil(values)
        if part.kind == "npy":
            np.save(folder / f"{name}.npy", values)
            np.save(folder / f"{name}.target.npy", found)
        elif part.labelled:
            write(folder / f"{name}.h5", volume=values, segmentation=found[None])
            with h5py.File(folder / f"{name}.h5", "a") as file:
                file.attrs["classes"] = np.array(CLASSES, "S")
        else:
            write(folder / f"{name}.h5", unitPar=found)
            with h5py.File(folder / f"{name}.h5", "a") as file:
                packed = "gzip" if part.seed % 2 else None
                last = np.moveaxis(values, 0, -1)
                file.create_dataset("full", data=last, chunks=True, compression=packed)


def _spoil(values: NDArray[Any]) -> None:
    values[tuple(n // 2 for n in values.shape)] = np.nan


class Made(Source):
    """A source of our own, in one of several dresses, and with a fault."""

    def __init__(self, part: Part, plan: Plan, rank: int, faulty: bool) -> None:
        self.part, self.plan, self.rank = part, plan, rank
        self.fault = plan.fault if faulty and rank in plan.victims else ""
        self.names, self.shape, self.dtype = part.names, part.shape, np.dtype(part.dtype)
        if part.labelled:
            self.classes = CLASSES
        else:
            self.parameters = Parameters.normalised(["a", "b", "c"][:P])
        self.whole = [volume(part, sample) for sample in range(part.count)]
        if faulty and plan.fault == "nan":
            _spoil(self.whole[plan.bad])
        self.slept = 0.0

    def read(self, sample: int, box: Box) -> NDArray[Any]:
        plan = self.plan
        if self.fault == "slow":
            time.sleep((sample * 7919 + self.rank) % 5 * 0.002)
        if self.fault == "late" and sample == plan.bad and not self.slept:
            self.slept = time.time()
            time.sleep(LONG * plan.time_limit)
        if self.fault == "fails" and sample == plan.bad:
            raise OSError(5, "Input/output error")
        if self.fault == "refuses" and sample == plan.bad:
            raise hs.DataError(f"{self.where(sample)}: I do not like it")
        values = self.whole[sample][box.slices()]
        dress = (self.part.seed + sample) % 3
        if dress == 1:
            return np.asfortranarray(values)
        return values.astype("float64" if self.dtype.kind == "f" else "int64") if dress else values

    def target(self, sample: int) -> NDArray[Any]:
        return rest(self.part, sample)

    def labels(self, sample: int, box: Box) -> NDArray[Any]:
        return rest(self.part, sample)[box.slices()]
