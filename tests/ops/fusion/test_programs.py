"""Random programs that read and change chains equal the serial run (tier: a few gloo
ranks).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from tests.ranks import run_ranks
from tests.selection import in_gate

LAYOUTS: list[dict[str, int]] = [
    {},
    {"depth": 2},
    {"data": 2, "width": 2},
    {"depth": 3, "height": 2},
]
TOLERANCE = 1e-5
NOISE = 20
"""So many times as far from the results in float64 may they be as serial ones in float32."""


class Program:
    """The same random steps with the same weights on cut tensors and on whole ones."""

    def __init__(self, seed: int, channels: int, x: Any) -> None:
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.channels = channels
        self.h = x
        self.earlier: list[Any] = []
        self.looks: list[Any] = []
        self.weights: list[torch.Tensor] = []
        self.log: list[str] = []

    def weight(self, *shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=self.generator).mul_(shape[-1] ** 0.5 / 4)
        self.weights.append(made.to(self.h.dtype).requires_grad_())
        return self.weights[-1]

    def conv(self) -> None:
        c = self.channels
        self.h = F.conv3d(self.h, self.weight(c, c, 3, 3, 3), self.weight(c), padding=1)

    def norm(self) -> None:
        kind = self.draw.choice(["batch", "instance", "group", "plain"])
        scale, shift = self.weight(self.channels), self.weight(self.channels)
        if kind == "group":
            self.h = F.group_norm(self.h, 2, scale, shift)
        elif kind == "instance":
            self.h = F.instance_norm(self.h, weight=scale, bias=shift)
        else:
            affine = (scale, shift) if kind == "batch" else (None, None)
            self.h = F.batch_norm(self.h, None, None, *affine, training=True)

    def activation(self) -> None:
        kind = self.draw.choice(["relu", "relu", "leaky", "leaky", "torch", "gelu"])
        inplace = self.draw.random() < 0.3
        if kind == "relu":
            self.h = F.relu(self.h, inplace)
        elif kind == "leaky":
            self.h = F.leaky_relu(self.h, self.draw.choice([0.01, 0.3, -0.2, 1.0]), inplace)
        else:
            self.h = torch.relu(self.h) if kind == "torch" else F.gelu(self.h)

    def pool(self) -> None:
        if min(self.h.shape[2:]) >= 6:
            pool = self.draw.choice([F.avg_pool3d, F.max_pool3d])
            self.h = pool(self.h, self.draw.choice([2, 2, (1, 2, 3)]))
            self.earlier = [e for e in self.earlier if e.shape == self.h.shape]

    def keep(self) -> None:
        self.earlier.append(self.h)

    def skip(self) -> None:
        if self.earlier:
            other = self.draw.choice(self.earlier)
            if self.draw.random() < 0.5:
                self.h = self.h + other
            else:
                both = torch.cat([self.h, other], 1)
                self.h = F.conv3d(both, self.weight(self.channels, 2 * self.channels, 1, 1, 1))

    def look(self) -> None:
        seen = self.draw.choice([self.h, *self.earlier])
        self.looks.append((seen * 0.5).mean())

    def change(self) -> None:
        self.draw.choice([self.h, *self.earlier]).mul_(0.75)

    def alias(self) -> None:
        seen = self.draw.choice([self.h, *self.earlier])
        view = self.draw.choice([seen.detach, lambda: seen[:, 1:], lambda: seen.to(seen.dtype)])()
        if self.draw.random() < 0.5:
            view.add_(0.25)

    def run(self, count: int) -> torch.Tensor:
        steps = [self.conv] * 4 + [self.norm] * 3 + [self.activation] * 4 + [self.pool] * 2
        steps += [self.keep] * 3 + [self.skip, self.look, self.change, self.alias]
        self.conv()
        for _ in range(count):
            step = self.draw.choice(steps)
            self.log.append(step.__name__)
            step()
        return sum(self.looks, (self.h * self.h).mean())


def outcome(
    seed: int, grid: hs.Grid | None, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[str]] | str:
    """Loss, last tensor and all gradients; what was raised otherwise."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    channels = draw.choice([2, 4, 6])
    x = torch.randn(2, channels, *draw.choice([(12, 12, 6), (6, 13, 12), (12, 6, 7)]))
    x = x.to(dtype).requires_grad_()
    program = Program(seed, channels, x if grid is None else hs.shard(x, grid))
    try:
        loss = program.run(14)
        if grid is not None:
            assert loss.shape == ()
        last = program.h if grid is None else program.h.full()
        wanted = [x, *program.weights]
        loss.backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    except hs.LayoutError as error:
        return f"{type(error).__name__}: {error}"
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted]
    if grid is not None:
        for grad in grads[1:]:
            torch.distributed.all_reduce(grad) if grid.size > 1 else None
            grad /= grid.size
    return [loss.detach(), last.detach(), *grads], program.log


def distance(a: torch.Tensor, b: torch.Tensor, floor: float) -> float:
    return float((a - b).norm() / max(float(b.norm()), floor))


def failures(layout: Mapping[str, int], seeds: range) -> tuple[list[Any], int]:
    """Programs whose results differ, and how many ran on both sides."""
    found = []
    ran = 0
    for seed in seeds:
        serial = outcome(seed, None)
        cut = outcome(seed, hs.Grid(**layout))
        if isinstance(serial, str):  # torch refuses: a chain need not
            continue
        if isinstance(cut, str):
            if "LayoutError" not in cut:
                found.append((seed, cut))
            continue
        ran += 1
        exact = outcome(seed, None, torch.float64)
        assert not isinstance(exact, str)
        floor = 1e-3 * max(float(t.norm()) for t in exact[0][2:])
        mine = [distance(a, b, floor) for a, b in zip(cut[0], exact[0], strict=True)]
        torchs = [distance(a, b, floor) for a, b in zip(serial[0], exact[0], strict=True)]
        if not max(mine) < TOLERANCE + NOISE * max(torchs):
            found.append((seed, max(mine), max(torchs), exact[1]))
    return found, ran


@pytest.mark.parametrize(
    ("layout", "part"),
    in_gate(
        [(layout, part) for layout in LAYOUTS for part in range(8)],
        kept=[(layout, 0) for layout in LAYOUTS[:3]],
    ),
    ids=str,
)
def test_programs_equal_the_serial_run(layout: dict[str, int], part: int) -> None:
    count = 8
    first = 1000 * LAYOUTS.index(layout) + part * count
    ranks = torch.Size(layout.values()).numel()
    for found, ran in run_ranks(ranks, failures, layout, range(first, first + count)):
        assert found == []
        assert ran > count / 4  # serial torch refuses more than half: changes in place
