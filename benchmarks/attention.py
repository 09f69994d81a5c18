"""Memory and traffic of attention over tokens that are cut over 1, 2, 4 and 8 ranks.

    python benchmarks/attention.py [--tokens N] [--heads H] [--features E] [--ranks 1 2 4 8]
                                   [--json OUT]

One step, forward and backward, of `F.scaled_dot_product_attention` on one sample in float32; the
largest of all ranks:

1. bytes saved for backward, counted,
2. bytes that a rank sends, counted where its communicator sends them,
3. the most that its fresh process grows by in the step (VmHWM),
4. processor seconds of a rank.

Once with keys and values that travel, and once with gathered ones, as `hyperslab.gather` makes
them. On one rank it is torch's own operator.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from clock import machine
from launch import run_ranks
from resident import resident
from saved import counting

import hyperslab as hs
from hyperslab.comm.communicator import GroupCommunicator

MIB = 2**20


def step(ranks: int, tokens: int, heads: int, features: int, gathered: bool) -> dict[str, float]:
    """Runs one step on this rank and returns what it took."""
    grid = hs.Grid(width=ranks)
    sent = count_sent()
    partition = grid.partition((1, heads * features, tokens))
    generator = torch.Generator().manual_seed(grid.rank)
    shape = partition.box(grid.coords).shape
    leaves = []
    for _ in range(3):
        block = torch.randn(shape, generator=generator)
        leaves.append(hs.Sharded.from_local(block, partition, grid).requires_grad_())
    before = resident("VmHWM"), time.process_time()
    sent.clear()
    with counting([]) as storages:
        q, k, v = (x.transpose(1, 2).unflatten(-1, (heads, -1)).transpose(1, 2) for x in leaves)
        if gathered:
            k, v = hs.gather(k, "width"), hs.gather(v, "width")
        y = F.scaled_dot_product_attention(q, k, v)
    y.square().mean().backward()
    return {
        "saved": sum(storages.values()),
        "sent": sum(sent),
        "grown": resident("VmHWM") - before[0],
        "seconds": time.process_time() - before[1],
        "own": 4 * shape[1] * shape[2],
    }


def count_sent() -> list[int]:
    """Returns a list to which every message that this rank sends adds its bytes."""
    sent: list[int] = []
    exchange = GroupCommunicator.exchange

    def counted(self: Any, sends: Any, receives: Any, what: str) -> Any:
        sent.extend(piece.nbytes for _, piece in sends)
        return exchange(self, sends, receives, what)

    GroupCommunicator.exchange = counted  # type: ignore[method-assign]
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--features", type=int, default=16, help="of a head")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = (options.tokens, options.heads, options.features)
    rows = []
    for gathered in (False, True):
        for ranks in options.ranks:
            found = run_ranks(ranks, step, ranks, *shape, gathered)
            worst = {key: max(rank[key] for rank in found) for key in found[0]}
            rows.append({"ranks": ranks, "gathered": gathered, **worst})
    print(f"{options.tokens} tokens, {options.heads} heads of {options.features}, float32; [MiB]")
    print(f"{'':10}{'ranks':>6}{'own':>8}{'saved':>8}{'sent':>8}{'process':>9}{'CPU [s]':>9}")
    for row in rows:
        name = "gathered" if row["gathered"] else "cut"
        sizes = "".join(f"{row[key] / MIB:8.1f}" for key in ("own", "saved", "sent"))
        print(f"{name:10}{row['ranks']:6}{sizes}{row['grown'] / MIB:9.1f}{row['seconds']:9.1f}")
    if options.json:
        found = {"machine": machine(), "options": shape, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
