"""Fused chains against torch's separate operators, and against a copy of the same bytes.

    python benchmarks/fused.py [--channels 16] [--side 64 128 128] [--pool 2] [--turns 15]
                               [--dtype float32 bfloat16] [--json OUT]

One thread, one block of one sample, both memory formats. The three take turns; each time is the
fastest of its turns. *of torch*: fused / separate; of bfloat16 torch has no average pooling on the
CPU, so torch's side pools in float32. *of a copy*: fused / copying the bytes that the
chain has to read and write, at the speed of a copy of the block.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from clock import machine, stopwatch

import hyperslab as hs

SLOPE = 0.01
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}


@dataclass(frozen=True)
class Chain:
    """A pass over a block in two versions of equal results, and the bytes that it must move."""

    name: str
    fused: Callable[[], Any]
    separate: Callable[[], Any]
    nbytes: int


@dataclass(frozen=True)
class Speed:
    """Of one chain [ms]."""

    chain: str
    dtype: str
    memory_format: str
    fused: float
    separate: float
    copy: float

    def __str__(self) -> str:
        return (
            f"{self.chain:32}{self.dtype:10}{self.memory_format:15}{self.fused:8.2f} ms"
            f"{self.fused / self.separate:8.2f} of torch{self.fused / self.copy:8.2f} of a copy"
        )


def chains(x: torch.Tensor, pool: int) -> Iterator[Chain]:
    """Those of a network's layer: activation and pooling, without and with batch norm."""
    ops = torch.ops.hyperslab
    channels = x.shape[1]
    tiles = [pool] * 3
    norm = torch.randn(3, 1, channels)
    mean, scale, shift = norm[:, 0]
    running = (mean, torch.ones(channels))

    for maximum in (False, True):
        pooling = F.max_pool3d if maximum else F.avg_pool3d
        name = "maximum" if maximum else "average"
        chain = (SLOPE, tiles, maximum)

        def separate(
            x: torch.Tensor, pooling: Callable[..., torch.Tensor] = pooling
        ) -> torch.Tensor:
            return pooling(F.leaky_relu(x, SLOPE).float(), pool).to(x.dtype)

        def normalized(x: torch.Tensor) -> torch.Tensor:
            return F.batch_norm(x, *running, scale, shift, False, eps=0.0)

        y, marks = ops.chain_forward(x, None, *chain, True, x.dtype)
        moved = x.nbytes + y.nbytes + marks.nbytes
        yield Chain(
            f"activation, {name}",
            lambda chain=chain: ops.chain_forward(x, None, *chain, True, x.dtype)[0],
            lambda separate=separate: separate(x),
            moved,
        )
        leaf = x.clone().requires_grad_()
        graph = separate(leaf)
        g = torch.randn_like(y)
        yield Chain(
            f"activation, {name}: backward",
            lambda chain=chain, g=g, marks=marks: ops.chain_backward(
                g, marks, None, None, None, *chain, x.shape, x.dtype
            ),
            lambda leaf=leaf, graph=graph, g=g: torch.autograd.grad(
                graph, leaf, g, retain_graph=True
            )[0],
            moved,
        )
        yield Chain(
            f"scale, activation, {name}",
            lambda chain=chain: ops.chain_forward(x, norm, *chain, True, x.dtype)[0],
            lambda separate=separate: separate(normalized(x)),
            x.nbytes + y.nbytes,
        )
    yield Chain(
        "moments",
        lambda: ops.channel_sums(x, 0)[0],
        lambda: torch.var_mean(x.float(), (0, 2, 3, 4))[1] * (x.numel() // channels),
        x.nbytes,
    )
    last = x.is_contiguous()
    other = FORMATS["channels last" if last else "contiguous"]
    yield Chain(
        "reorder",
        lambda: ops.reorder(x, last, x.dtype),
        lambda: x.contiguous(memory_format=other),
        2 * x.nbytes,
    )


@torch.no_grad()
def measure(shape: tuple[int, ...], dtype: torch.dtype, pool: int, turns: int) -> Iterator[Speed]:
    """All chains on one block in both memory formats."""
    device = torch.device("cpu")
    for memory_format, order in FORMATS.items():
        x = torch.randn(shape).to(dtype).contiguous(memory_format=order)
        target = torch.empty_like(x)
        with torch.enable_grad():
            measured = list(chains(x, pool))
        for chain in measured:
            parts = [chain.fused, chain.separate, partial(target.copy_, x)]
            times = [stopwatch(device, parts) for _ in range(turns)]
            fused, separate, copy = (1e3 * min(part) for part in zip(*times, strict=True))
            share = chain.nbytes / (2 * x.nbytes)
            yield Speed(chain.name, str(dtype)[6:], memory_format, fused, separate, copy * share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--side", type=int, nargs=3, default=[64, 128, 128])
    parser.add_argument("--pool", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hs.Grid()  # sets the allocator, so that fresh results are not fresh pages
    found = {**machine(), "options": vars(options) | {"json": None}, "speeds": []}
    shape = (1, options.channels, *options.side)
    for dtype in options.dtype:
        for speed in measure(shape, getattr(torch, dtype), options.pool, options.turns):
            print(speed, flush=True)
            found["speeds"].append(asdict(speed))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
