"""What happens in a round: drawn from the seed and the round's number alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FAULTS = ("slow", "fails", "refuses", "nan", "vanishes", "truncated", "late", "raises", "killed")
"""A sleeping source; an OSError, a DataError of the source; a value; a file; a sleep beyond the
time limit; an exception of the consumer; SIGKILL. `docs/formats.md` says what each comes to."""

WEIGHTS = (5, 5, 5, 5, 5, 5, 1, 5, 5)  # who is late takes seconds

BAD_SAMPLE = ("fails", "refuses", "nan", "vanishes", "truncated")

AXES = ("data", "depth", "height", "width")


@dataclass(frozen=True)
class Part:
    """One data set of a round."""

    seed: int
    kind: str  # hdf5 | npy | own
    labelled: bool
    shape: tuple[int, int, int, int]
    dtype: str
    count: int
    how: dict[str, Any]  # for hyperslab.open
    kept: float  # the budget's share of what a rank could keep; < 0 for automatic
    staging: bool

    @property
    def names(self) -> list[str]:
        return [f"s{i:02d}" for i in range(self.count)]

    @property
    def steps(self) -> int:
        return -(-self.count // self.how["batch_size"])


@dataclass(frozen=True)
class Visit:
    """An epoch, or a part of one: steps start to stop; ``zipped`` with the visit that follows."""

    part: int
    epoch: int
    start: int
    stop: int
    onward: bool
    zipped: bool = False


@dataclass(frozen=True)
class Plan:
    seed: int
    number: int
    extents: dict[str, int]
    parts: tuple[Part, ...]
    visits: tuple[Visit, ...]
    fault: str = ""
    victims: tuple[int, ...] = ()  # ranks on which it happens
    bad: int = -1  # the sample of the first part
    after: int = 0  # steps of the round until it happens, where it is of no sample
    synced: bool = False  # a sum over all ranks after each step, as training has
    hostile: bool = False  # the consumer changes what it gets
    jitter: float = 0.0  # the longest sleep after a step [s]
    time_limit: float = 30.0  # of the process group [s]
    damage: int = 0  # the visit before which a file is damaged

    @property
    def harmless(self) -> bool:
        """Whether all is kept when a file is damaged."""
        first = self.parts[0]
        if self.fault not in ("vanishes", "truncated") or not first.kept >= 1:
            return False
        before = self.visits[: self.damage]
        whole = any((v.part, v.start, v.stop) == (0, 0, first.steps) for v in before)
        return first.how["mode"] == "preload" or (
            first.how["mode"] in ("store", "sample") and whole
        )

    @property
    def ranks(self) -> int:
        product = 1
        for extent in self.extents.values():
            product *= extent
        return product

    def __str__(self) -> str:
        grid = "x".join(str(n) for n in self.extents.values())
        parts = " + ".join(
            f"{p.kind}{' labels' if p.labelled else ''} {p.count}x{'x'.join(map(str, p.shape))} "
            f"{p.dtype} {p.how['mode']}{f' {p.kept:g}' if p.how['mode'] != 'direct' else ''}"
            f"{' staged' if p.staging else ''} b{p.how['batch_size']} "
            f"p{p.how['prefetch']}{' aug' if p.how['augment'] else ''}"
            for p in self.parts
        )
        skip = f" {self.parts[0].how['on_error']}" if self.fault else ""
        return f"grid {grid}: {parts}: {self.fault or 'no fault'}{skip}"


def draw(seed: int, number: int, ranks: int, fault: str | None = None) -> Plan:
    """The round of this number; ``fault`` instead of the one drawn."""
    rng = random.Random(f"{seed}/{number}")
    extents = rng.choice(list(_grids(ranks)))
    if fault is None:
        fault = rng.choices(FAULTS, WEIGHTS)[0] if rng.random() < 0.6 else ""
    parts = [_part(rng, extents) for _ in range(rng.choice([1, 1, 2]))]
    parts[0] = _for_fault(rng, parts[0], fault, extents)
    bad = rng.randrange(parts[0].count)
    victims = tuple(range(ranks)) if rng.random() < 0.4 else (rng.randrange(ranks),)
    if fault in ("late", "raises", "killed"):
        victims = (rng.randrange(ranks),)
    visits = tuple(_visits(rng, parts))
    pauses = [n for n in range(len(visits)) if n == 0 or not visits[n - 1].zipped]
    steps = sum(visit.stop - visit.start for visit in visits)
    return Plan(
        seed,
        number,
        extents,
        tuple(parts),
        visits,
        fault,
        victims,
        bad,
        after=rng.randrange(max(1, steps)),
        synced=rng.random() < 0.5,
        hostile=rng.random() < 0.5,
        jitter=rng.choice([0, 0, 0.001, 0.01]),
        time_limit=4.0 if fault == "late" else 30.0,
        damage=rng.choice(pauses),
    )


def _grids(ranks: int) -> Iterator[dict[str, int]]:
    """All ways to write the number as a product of four."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for extents in itertools.product(divisors, repeat=4):
        if extents[0] * extents[1] * extents[2] * extents[3] == ranks:
            yield dict(zip(AXES, extents, strict=True))


def _part(rng: random.Random, extents: dict[str, int]) -> Part:
    low = [extents[axis] for axis in AXES[1:]]
    spatial = [rng.randint(n, 9) for n in low]
    if rng.random() < 0.4:
        spatial = [max(spatial)] * 3
    kind = rng.choice(["hdf5", "npy", "own"])
    mode = rng.choice(["direct", "store", "store", "preload", "sample"])
    how: dict[str, Any] = {
        "batch_size": rng.randint(1, 7),
        "seed": rng.randrange(100),
        "shuffle": rng.random() < 0.7,
        "augment": rng.random() < 0.4,
        "mode": mode,
        "on_error": rng.choice(["stop", "skip"]),
        "prefetch": rng.choice([0, 1, 2, 5]),
        "prefetch_bytes": rng.choice([0, 5000, 1 << 30]),
        "dtype": rng.choice(["float32", "float32", "float64", "bfloat16"]),
    }
    return Part(
        rng.randrange(10**6),
        kind,
        kind != "npy" and rng.random() < 0.4,
        (rng.choice([1, 2, 4]), *spatial),
        rng.choice(["int16", "uint16", "float32"]),
        rng.randint(1, 14),
        how,
        rng.choice([0, 0.3, 0.6, 1, 1, 9, -1]),
        mode != "direct" and rng.random() < 0.3,
    )


def _for_fault(rng: random.Random, part: Part, fault: str, extents: dict[str, int]) -> Part:
    """A data set to which it can happen."""
    changes: dict[str, Any] = {}
    if fault in ("slow", "fails", "refuses", "late"):
        changes = {"kind": "own"}
    elif fault == "nan":
        changes = {"dtype": "float32"}
    elif fault in ("vanishes", "truncated"):
        kind = rng.choice(["hdf5", "npy"])
        changes = {"kind": kind, "labelled": part.labelled and kind == "hdf5"}
    if fault == "late" and part.how["on_error"] == "stop":  # all replicas wait for each owner
        changes["how"] = part.how | {"batch_size": 1, "mode": "store"}
        changes["kept"] = 9
    return Part(**{**{name: getattr(part, name) for name in Part.__match_args__}, **changes})


def _visits(rng: random.Random, parts: list[Part]) -> Iterator[Visit]:
    """As a trainer does: epochs of the first data set, between them those of the second."""
    epochs = rng.randint(1, 4)
    first = rng.choice([0, 0, 0, 2])
    for epoch in range(first, first + epochs):
        steps = parts[0].steps
        start = rng.randint(0, steps) if rng.random() < 0.2 else 0
        stop = rng.randint(start, steps) if rng.random() < 0.2 else steps
        validated = len(parts) > 1
        zipped = validated and rng.random() < 0.2
        yield Visit(0, epoch, start, stop, rng.random() < 0.5, zipped)
        if validated:
            yield Visit(1, 0, 0, parts[1].steps, False)
