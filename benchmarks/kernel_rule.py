"""Times every implementation of each convolution pass, and shows where the rule takes a slower one.

    python benchmarks/kernel_rule.py [--network cosmoflow ...] [--dtype float32 bfloat16]
                                     [--turns 7] [--json OUT]
    python benchmarks/kernel_rule.py --table OUT [OUT ...]

The passes are those that a step of each network runs on two ranks along the depth; the first rank
times each with one thread by every implementation that supports it, while the other waits: CPU
seconds, the least of some turns, which other work on the machine changes little. Where the rule's
sum is more than 2 % above that of the fastest implementations, the thresholds in
`hyperslab.kernels.registry` want another look. ``--table`` compares by the times of earlier runs,
so that a changed rule needs no new measurement.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from clock import machine, write_results
from launch import run_ranks
from networks import NETWORKS, OTHERS, Step, make_case

import hyperslab as hs
from hyperslab.kernels import conv
from hyperslab.kernels.conv import dispatch, guarded
from hyperslab.kernels.conv_problem import ConvOptions, Problem, in_channels_last
from hyperslab.kernels.conv_variants import CONV_VARIANTS
from hyperslab.kernels.registry import casts_filters_last, conv_variant, force

SLOW = 2.0
"""Implementations that take longer than so many times the fastest are timed once."""
ALLOWED = 1.02
"""Times the sum of the fastest implementations."""

Pass = tuple[Problem, bool]
"""A pass and if it has a bias."""


def passes_of(step: Step) -> Counter[Pass]:
    """The passes of a step, with how often each occurs; all ranks call this.

    Without those that others are made of: their time is part of these.
    """
    found: Counter[Pass] = Counter()
    under_way = False

    def note(run: Callable[..., Any], problem: Problem, *operands: Any) -> Any:
        nonlocal under_way
        if under_way:
            return guarded(run, problem, *operands)
        bias = operands[-1] is True or isinstance(operands[-1], torch.Tensor)
        found[problem, bias] += 1
        under_way = True
        try:
            return guarded(run, problem, *operands)
        finally:
            under_way = False

    with mock.patch.object(conv, "guarded", note):
        step.run()
    return found


def operands_of(problem: Problem, bias: bool) -> tuple[Any, ...]:
    """Random blocks and parameters as the step has them."""
    x = in_channels_last(torch.randn(problem.x).to(problem.dtype))
    g = in_channels_last(torch.randn(problem.y).to(problem.dtype))
    weight = torch.randn(problem.weight)
    if casts_filters_last(weight, problem.dtype, "fixed"):
        weight = in_channels_last(weight)
    weight = weight.to(problem.dtype)
    if problem.task == "weight":
        return x, g, weight, bias
    channels = problem.weight[0] if problem.task == "forward" else problem.x[1]
    b = torch.randn(channels).to(problem.dtype) if bias else None
    return (x if problem.task == "forward" else g), weight, b


def seconds_of(problem: Problem, bias: bool, turns: int) -> dict[str, float]:
    """Least CPU seconds of this thread by implementation; they take turns."""
    operands = operands_of(problem, bias)
    gradient = torch.empty(problem.weight)
    variants = CONV_VARIANTS[problem.task]

    def once(name: str) -> float:
        begin = time.thread_time()
        with force({f"conv {problem.task}": name}):
            found = dispatch(problem, *operands)
        if problem.task == "weight":
            _keep(found[0], gradient)
        return time.thread_time() - begin

    names = [name for name, variant in variants.items() if variant.legal(problem)]
    least = {}
    for name in names:
        try:
            once(name)
            least[name] = once(name)
        except RuntimeError:  # oneDNN has no such kernel
            continue
    near = [name for name in least if least[name] <= SLOW * min(least.values())]
    for _ in range(turns):
        for name in near:
            least[name] = min(least[name], once(name))
    return least


def _keep(dw: torch.Tensor, gradient: torch.Tensor) -> None:
    """Copies the weight's gradient to where it is averaged, as `shard_parameter` does."""
    if dw.is_contiguous():
        gradient.copy_(dw)
    else:
        torch.ops.hyperslab.reorder_into(dw, gradient)


def on_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a pass."""
    grid = hs.Grid(depth=2)
    rows = []
    for network in options.network:
        for dtype in options.dtype:
            case = make_case(network, NETWORKS.get(network, 64), False, grid.device)
            case.cut(grid)
            step = Step(case, getattr(torch, dtype))
            step.run()
            found = passes_of(step)
            del step, case
            for (problem, bias), count in found.items() if grid.is_main else ():
                seconds = seconds_of(problem, bias, options.turns)
                given = {"options": problem.options._asdict(), "dtype": dtype}
                row = asdict(problem) | given | {"bias": bias, "count": count}
                rows.append({"network": network, **row, "seconds": seconds})
            grid.barrier()
    return rows


def problem_in(row: dict[str, Any]) -> Problem:
    """The pass of a row."""
    given = row | row["options"]  # of older rows the padding is beside the others
    stride, padding, dilation = (tuple(given[name]) for name in ("stride", "padding", "dilation"))
    options = ConvOptions(stride, padding, dilation, given["groups"])
    x, weight = tuple(row["x"]), tuple(row["weight"])
    return Problem(row["task"], x, weight, getattr(torch, row["dtype"]), options)


def print_table(rows: list[dict[str, Any]]) -> bool:
    """Each pass where the rule is not the fastest, and the sums; True if all are allowed."""
    sums: dict[tuple[str, str], list[float]] = {}
    wins: Counter[tuple[str, str]] = Counter()
    for row in rows:
        problem = problem_in(row)
        seconds = row["seconds"]
        best = min(seconds, key=lambda name: seconds[name])
        ruled = conv_variant(problem)
        wins[problem.task, best] += row["count"]
        both = sums.setdefault((row["network"], row["dtype"]), [0.0, 0.0])
        both[0] += row["count"] * seconds[ruled]
        both[1] += row["count"] * seconds[best]
        if seconds[ruled] > ALLOWED * seconds[best]:
            shape = "x".join(map(str, row["x"])), "x".join(map(str, row["weight"]))
            others = "  ".join(f"{name} {1e3 * t:.3f}" for name, t in sorted(seconds.items()))
            print(
                f"{row['network']:10}{row['dtype']:9}{row['task']:8}{row['count']} * "
                f"{shape[0]} by {shape[1]}: rule {ruled}, {others}"
            )
    print("\nfastest, times: " + ", ".join(f"{' '.join(k)} {n}" for k, n in wins.most_common()))
    print(f"\n{'':20}{'rule [ms]':>12}{'fastest':>12}{'ratio':>8}")
    for (network, dtype), (rule, fastest) in sums.items():
        ratio = rule / fastest
        print(f"{network:11}{dtype:9}{1e3 * rule:12.2f}{1e3 * fastest:12.2f}{ratio:8.3f}")
    return all(rule <= ALLOWED * fastest for rule, fastest in sums.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [*NETWORKS, *OTHERS]
    parser.add_argument("--network", nargs="+", choices=names, default=list(NETWORKS))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the times there")
    parser.add_argument("--table", nargs="+", type=Path, metavar="OUT", help="of these times")
    options = parser.parse_args()
    if options.table:
        rows = [row for path in options.table for row in json.loads(path.read_text())["passes"]]
        raise SystemExit(not print_table(rows))
    where = machine()
    rows = run_ranks(2, on_ranks, options)[0]
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    write_results(options, where, {"passes": rows})
    raise SystemExit(not print_table(rows))


if __name__ == "__main__":
    main()
