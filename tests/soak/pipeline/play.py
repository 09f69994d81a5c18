"""A round on one rank: open, consume, compare every byte, and say how it went."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import logging
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm import all_reduce_sum
from hyperslab.data import Dataset
from hyperslab.data.open_dataset import sample_bytes
from hyperslab.data.sampler import IDENTITY, Symmetry
from tests.soak.pipeline.made import Made, rest, volume
from tests.soak.pipeline.plan import AXES, Part, Plan, Visit


class Consumed(Exception):
    """What the consumer raises by itself."""


@dataclass
class Told:
    """What a rank has to tell of a round."""

    shown: list[tuple[int, int, int, tuple[int, ...]]] = field(default_factory=list)
    """Part, number of the visit, step, samples."""
    error: tuple[str, str] | None = None  # its type and words
    when: float = 0.0  # the moment at which it was left to the caller
    fault: float = 0.0  # the moment of this rank's fault
    read: int = 0
    sent: int = 0
    received: int = 0
    rss: int = 0  # [B]
    threads: int = 0
    files: int = 0


class Sent(logging.Handler):
    """Adds up the bytes that this rank sends."""

    def __init__(self, told: Told) -> None:
        super().__init__(logging.DEBUG)
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r": (\d+) B from rank", record.getMessage())
        if found:
            self.told.sent += int(found[1])


def play(plan: Plan, folder: Path) -> Told:
    """One round; a violation is an AssertionError, an error that is stated is told."""
    told = Told()
    logger, sent = logging.getLogger("hyperslab.data"), Sent(told)
    logger.addHandler(sent)
    logger.setLevel(logging.DEBUG)
    above = logging.getLogger("hyperslab")
    levels = {logger: logging.NOTSET, above: above.level}
    above.setLevel(logging.ERROR)
    try:
        with _group(plan, folder):
            _round(plan, folder, told)
    finally:
        logger.removeHandler(sent)
        for one, level in levels.items():
            one.setLevel(level)
    _measure(told)
    return told


@contextlib.contextmanager
def _group(plan: Plan, folder: Path) -> Iterator[None]:
    """A process group of the round's own, with its time limit."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'group'}",
        rank=rank,
        world_size=plan.ranks,
        timeout=datetime.timedelta(seconds=plan.time_limit),
    )
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def _round(plan: Plan, folder: Path, told: Told) -> None:
    sets: list[Dataset] = []
    try:
        grid = hs.Grid(**plan.extents)
        with contextlib.ExitStack() as stack:
            for number in range(len(plan.parts)):
                sets.append(stack.enter_context(_open(plan, number, folder, grid)))
            _consume(plan, folder, sets, told)
            told.read = sum(data.bytes_read for data in sets)
        told.received = sum(data.received_bytes for data in sets)
    except (hs.DataError, hs.CommError, Consumed) as error:
        told.error = type(error).__name__, str(error)
        told.when = time.time()
    finally:
        if sets:
            told.fault = told.fault or getattr(sets[0].source, "slept", 0.0)


def _open(plan: Plan, number: int, folder: Path, grid: hs.Grid) -> Dataset:
    part = plan.parts[number]
    how = dict(part.how)
    how["dtype"] = getattr(torch, how["dtype"])
    source: Any = folder / str(number)
    if part.kind == "own":
        source = Made(part, plan, grid.rank, number == 0)
    elif not part.labelled:
        how["channels"] = "first" if part.kind == "npy" else "last"
    if how["mode"] != "direct":
        how["budget"] = budget(part, grid)
        how["staging"] = folder / "fast" if part.staging else None
    return hs.open(source, grid, split="all", transform=None, **how)


def budget(part: Part, grid: hs.Grid) -> int | None:
    """Of each rank [B]."""
    if part.kept < 0:
        return None
    mine = -(-part.count // grid.data)
    whole = part.how["mode"] == "sample"
    if whole:
        mine = -(-mine // (grid.size // grid.data))
    return int(part.kept * mine * sample_bytes(_shape(part), grid, whole=whole))


def _shape(part: Part) -> Made:
    """All that a budget has to know."""
    made = object.__new__(Made)
    made.names, made.shape, made.dtype = part.names, part.shape, np.dtype(part.dtype)
    made.classes = ("a", "b", "c") if part.labelled else ()
    made.parameters = hs.data.Parameters.normalised([] if part.labelled else ["a", "b", "c"])
    return made


def _damage(plan: Plan, folder: Path, grid: hs.Grid) -> None:
    """What befalls a file between two visits."""
    grid.barrier()
    part = plan.parts[0]
    file = folder / "0" / f"{part.names[plan.bad]}.{'npy' if part.kind == 'npy' else 'h5'}"
    if grid.is_main and plan.fault == "vanishes":
        file.unlink()
    if grid.is_main and plan.fault == "truncated":
        os.truncate(file, file.stat().st_size // 3)
    grid.barrier()


def _consume(plan: Plan, folder: Path, sets: list[Dataset], told: Told) -> None:
    """The visits one after the other, some side by side."""
    grid = sets[0].grid
    rng = random.Random(f"{plan.number}/{grid.rank}")
    step = itertools.count()
    running = []
    for number, visit in enumerate(plan.visits):
        if number == plan.damage and plan.fault in ("vanishes", "truncated"):
            _damage(plan, folder, grid)
        running.append(_visit(plan, sets[visit.part], number, visit, told))
        if visit.zipped:
            continue
        for _ in itertools.zip_longest(*running):
            _at_step(plan, grid.rank, next(step), told)
            if plan.synced:
                all_reduce_sum(torch.ones(1), grid.group(AXES), "the step")
            time.sleep(rng.random() * plan.jitter)
        running = []


def _at_step(plan: Plan, rank: int, step: int, told: Told) -> None:
    if rank not in plan.victims or step != plan.after:
        return
    told.fault = time.time()
    if plan.fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.fault == "raises":
        raise Consumed


def _visit(plan: Plan, data: Dataset, number: int, visit: Visit, told: Told) -> Iterator[None]:
    part = plan.parts[visit.part]
    read, most = data.bytes_read, budget(part, data.grid)
    batches = data.epoch(visit.epoch, visit.start, onward=visit.onward)
    for x, y in itertools.islice(batches, None if visit.stop == data.steps else _left(visit)):
        _check(part, data, visit.epoch, x, y)
        told.shown.append((visit.part, number, data.at - 1, data.shown))
        assert most is None or part.how["mode"] == "direct" or data.stored_bytes <= most
        if plan.hostile:
            x.local.fill_(-7)
            y.local.fill_(1)
        yield
        if visit.stop < data.steps and data.at >= visit.stop:
            break
    batches.close()
    full = part.how["mode"] == "preload" or _seen(plan, number)
    if full and most is not None and part.kept >= 1 and part.how["mode"] != "direct":
        assert data.bytes_read == read or plan.fault, "what is kept is not read again"


def _left(visit: Visit) -> int:
    return visit.stop - visit.start


def _seen(plan: Plan, number: int) -> bool:
    """Whether an earlier visit has shown a whole epoch of the same data set."""
    part = plan.visits[number].part
    whole = (0, plan.parts[part].steps)
    return any(v.part == part and (v.start, v.stop) == whole for v in plan.visits[:number])


def _check(part: Part, data: Dataset, epoch: int, x: hs.Sharded, y: hs.Sharded) -> None:
    """Every value of this rank's block."""
    dtype = getattr(torch, part.how["dtype"])
    volumes, found = [], []
    for sample in data.shown:
        key = part.how["seed"], epoch, sample
        drawn = Symmetry.draw(part.shape, *key, turns=not part.labelled)
        turn = drawn if part.how["augment"] else IDENTITY
        volumes.append(turn.apply(volume(part, sample)))
        aim = rest(part, sample)
        found.append(turn.apply(aim[None])[0] if part.labelled else aim)
    wide = torch.promote_types(dtype, torch.float32)
    values = torch.from_numpy(np.ascontiguousarray(np.stack(volumes)[x.box.slices()])).to(wide)
    assert torch.equal(x.local, values.to(dtype)), f"epoch {epoch}, samples {data.shown}: values"
    aims = torch.from_numpy(np.ascontiguousarray(np.stack(found)[y.box.slices()]))
    expected = aims.long() if part.labelled else aims.to(wide)
    assert torch.equal(y.local, expected), f"epoch {epoch}, samples {data.shown}: targets"


def _measure(told: Told) -> None:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    told.rss = int(status["VmRSS"].split()[0]) * 1024
    told.threads = int(status["Threads"])
    told.files = len(os.listdir("/proc/self/fd"))
