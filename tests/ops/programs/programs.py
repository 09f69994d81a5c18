"""Random small programs of plain torch calls, run on whole tensors and on cut ones side by side.

What an operator does next is drawn from the global shapes alone, so both runs, and all ranks, draw
the same. A step that the cut run refuses is left out of both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import average, distance

MOST = 6000  # elements of a tensor
Draw = random.Random
Tensor = torch.Tensor


@dataclass
class Run:
    """One of the two runs: its tensors, and its leaves by the order in which they were made."""

    pool: list[Any]
    leaves: list[Tensor] = field(default_factory=list)
    cut: bool = False

    def weight(self, draw: Draw, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        w = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5
        self.leaves.append(w.requires_grad_())
        return w


Op = Callable[[Run, Draw, Any], Any]
OPS: dict[str, Op] = {}


def op(run: Op) -> Op:
    OPS[run.__name__] = run
    return run


def spatial(x: Any) -> int:
    return x.dim() - 2


def need(condition: bool) -> None:
    if not condition:
        raise Skip


class Skip(Exception):
    """The operator does not fit the shape that is there."""


def volume(x: Any) -> None:
    need(3 <= x.dim() <= 5 and x.numel() > 0)


def whole(x: Any) -> Tensor:
    return x.full() if isinstance(x, hs.Sharded) else x


def start(seed: int, grid: hs.Grid) -> tuple[Run, Run, Draw]:
    d = random.Random(seed)
    spatial_dims = d.choice([3, 3, 3, 2, 1])
    cuts = [grid.depth, grid.height, grid.width][3 - spatial_dims :]
    shape = [d.choice([1, 2, 3, grid.data, grid.data + 1]), d.randint(1, 4)]
    shape += [n * d.choice([1, 1, 2, 3]) + d.randint(0, 3) for n in cuts]
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    runs = []
    for cut in (True, False):
        leaf = value.clone().requires_grad_()
        x = hs.shard(leaf, grid) if cut else leaf
        runs.append(Run([x * 1], [leaf], cut))
    runs[0].pool[0] = recut(runs[0].pool[0], d.choice([0, d.randrange(1, 999)]))
    return runs[0], runs[1], d


def run_program(
    seed: int, grid: hs.Grid, length: int, names: list[str] | None = None
) -> tuple[list[str], list[str]]:
    """The steps that ran or were refused, and the differences."""
    ours, torchs, draw = start(seed, grid)
    log, failures = [f"seed {seed} {tuple(torchs.pool[0].shape)} {grid}"], []
    for _ in range(length):
        name = draw.choice(sorted(names or OPS))
        at = draw.randrange(len(ours.pool))
        at = len(ours.pool) - 1 if draw.random() < 0.7 else at
        state = draw.getrandbits(32)
        counts = [(len(r.pool), len(r.leaves)) for r in (ours, torchs)]
        shape = tuple(torchs.pool[at].shape)
        try:
            y = OPS[name](ours, random.Random(state), ours.pool[at])
            error = None
        except Skip:
            error = "skip"
        except (hs.HyperslabError, RuntimeError, ValueError, IndexError, NotImplementedError) as e:
            error = f"{type(e).__name__}: {e}"
        if error is None:
            try:
                z = OPS[name](torchs, random.Random(state), torchs.pool[at])
            except (RuntimeError, ValueError, IndexError) as e:
                failures.append(f"LENIENT {name}{shape} {type(e).__name__} {str(e)[:150]}")
                break
        else:
            for r, (p, w) in zip((ours, torchs), counts, strict=True):
                del r.pool[p:], r.leaves[w:]
            if error != "skip":
                log.append(
                    f"REFUSED {name}{shape} {getattr(ours.pool[at], 'partition', '')} :: {error}"
                )
            continue
        log.append(f"{name}{shape}->{tuple(z.shape)}")
        ours.pool.append(y)
        torchs.pool.append(z)
        for r in (ours, torchs):
            del r.pool[:-4]
        for a, b in zip(ours.pool, torchs.pool, strict=True):
            far = distance(whole(a).detach(), b.detach())
            if not far <= 1e-10:
                failures.append(f"value after {name}{shape}: {far:.1e}")
        if failures:
            break
    if not failures:
        total: Any = 0
        for r in (ours, torchs):
            total = 0
            for i, y in enumerate(r.pool):
                total = total + (y * y.detach().cos() * (i + 1)).sum() if y.dim() else total + y
            if isinstance(total, hs.Sharded):
                total = total.local
            total.backward() if total.requires_grad else None
        for i, (a, b) in enumerate(zip(ours.leaves, torchs.leaves, strict=True)):
            g = a.grad if i == 0 else average(a.grad)
            far = distance(g, b.grad)
            if b.grad is not None and b.grad.norm() < 1e-6:  # zero but for rounding
                far = float(g is None or g.norm() > 1e-5)
            if not far <= 1e-8:
                failures.append(f"gradient of leaf {i} {tuple(b.shape)}: {far:.1e}")
    return log, failures
