"""What an operator on a cut tensor costs beside its kernel: microseconds of Python and bookkeeping.

    python benchmarks/overhead.py [--ranks 1 2] [--op conv3d ...] [--calls 40] [--rounds 12]
                                  [--rules] [--json OUT]

Blocks are tiny (8 channels of 4 x 8 x 8), so that a kernel takes next to nothing. Each operator
runs on a cut tensor and, as plain torch, on a block of the same shape without communication.
*Kernels* are torch's operators that the rule calls, each run again alone, but for views;
*messages* is the time of its messages and sums, which contains waiting for the other rank. What
is neither is the *overhead*: rules, autograd, wrapping, slices. A forward pass keeps its graph; a
backward pass is `torch.autograd.grad`. The best of several rounds, of the slower rank; take it on
an idle machine.

`--rules` goes through all rules that can be called with a few operands, on one rank, in CPU time:
what each takes above plain torch, by family.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from clock import machine, slowest, write_results
from launch import run_ranks
from operator_cases import CHANNELS, DEPTH, WIDTH, Case, cases
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import hyperslab as hs
from hyperslab.comm.communicator import Arriving, Communicator, PeerTensor
from hyperslab.geometry import Partition
from hyperslab.tensor.dispatch import RULES, op_name

WARM_UP = 5


def _unrecorded() -> AbstractContextManager[object]:
    """What messages copy is no kernel."""
    recording = torch._C._len_torch_dispatch_stack() > 0
    return _disable_current_modes() if recording else nullcontext()


class Kernels(TorchDispatchMode):
    """Writes down the operators that are called, but for views and empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(  # type: ignore[no-untyped-def, override]
        self, operator, types, args=(), kwargs=None
    ):
        if not operator.is_view and "empty" not in operator.name():
            self.calls.append(partial(operator, *args, **(kwargs or {})))
        with torch._C.DisableTorchFunctionSubclass():
            return operator(*args, **(kwargs or {}))

    def seconds(self, rounds: int) -> float:
        """Of all of them, each alone: the best of several rounds."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return sum(min(_seconds(call) for _ in range(rounds)) for call in self.calls)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Timed:
    """A communicator that adds up the seconds that its messages and sums hold the rank up."""

    def __init__(self, inner: Communicator, spent: list[float]) -> None:
        self.inner = inner
        self.spent = spent
        self.ranks = inner.ranks
        self.rank = inner.rank
        self.size = inner.size

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> Arriving:
        begin = time.perf_counter()
        with _unrecorded():
            arriving = self.inner.exchange(sends, receives, what)
        self.spent[0] += time.perf_counter() - begin
        return TimedArrival(arriving, self.spent)

    def sum_in_place(self, x: torch.Tensor, what: str) -> torch.Tensor:
        begin = time.perf_counter()
        with _unrecorded():
            total = self.inner.sum_in_place(x, what)
        self.spent[0] += time.perf_counter() - begin
        return total


class TimedArrival:
    """Messages under way, whose wait is timed."""

    def __init__(self, inner: Arriving, spent: list[float]) -> None:
        self.inner = inner
        self.spent = spent

    def wait(self) -> list[torch.Tensor]:
        begin = time.perf_counter()
        with _unrecorded():
            arrived = self.inner.wait()
        self.spent[0] += time.perf_counter() - begin
        return arrived


class TimedGrid(hs.Grid):
    """A grid whose messages and sums are timed."""

    @cached_property
    def spent(self) -> list[float]:
        return [0.0]

    @cached_property
    def halos(self) -> Communicator:  # type: ignore[override]
        return Timed(super().halos, self.spent)

    def group(self, axes: Sequence[str]) -> Communicator | None:
        inner = super().group(axes)
        return None if inner is None else Timed(inner, self.spent)


@dataclass(frozen=True)
class Times:
    """Of one pass [us]: plain torch's; the cut one's without messages; its messages', kernels'."""

    plain: float
    cut: float
    message: float
    kernels: float

    @property
    def overhead(self) -> float:
        return self.cut - self.kernels


class Side:
    """One operator on one input, plain or cut, in its two passes."""

    def __init__(self, case: Case, leaf: torch.Tensor, like: hs.Sharded | None = None) -> None:
        self.run = case.run
        self.leaf = leaf
        self.x = leaf if like is None else like.like(leaf)
        self.weights = [torch.randn(shape, requires_grad=True) for shape in case.weights]
        self.operands: list[torch.Tensor] = [*self.weights]
        if case.labels:
            labels = torch.zeros((1, *self.x.shape[2:]), dtype=torch.int64)
            cut = None if like is None else hs.shard(labels, like.grid, channels=False)
            self.operands.append(labels if cut is None else cut)
        self.gradient = torch.ones_like(self.forward())

    def forward(self) -> torch.Tensor:
        y = self.run(self.x, *self.operands)
        return y.local if isinstance(y, hs.Sharded) else y

    def backward(self, y: torch.Tensor) -> None:
        torch.autograd.grad(y, [self.leaf, *self.weights], self.gradient)

    def kernels(self, rounds: int) -> list[float]:
        """Seconds of the kernels of both passes."""
        with Kernels() as forward:
            y = self.forward()
        with Kernels() as backward:
            self.backward(y)
        return [forward.seconds(rounds), backward.seconds(rounds)]

    def seconds(self, calls: int, spent: list[float]) -> list[list[float]]:
        """Per call, forward and backward: the whole, and what of it messages took."""
        found = []
        results: list[torch.Tensor] = []
        for turn in (
            lambda: results.append(self.forward()),
            lambda: self.backward(results.pop()),
        ):
            spent[0] = 0.0
            begin = time.perf_counter()
            for _ in range(calls):
                turn()
            whole = time.perf_counter() - begin
            found.append([(whole - spent[0]) / calls, spent[0] / calls])
        return found


def measure(case: Case, grid: TimedGrid, calls: int, rounds: int) -> dict[str, Times]:
    """Both passes of an operator; on every rank."""
    shape = (1, case.channels, DEPTH * grid.size, WIDTH, WIDTH)
    block_shape = (1, case.channels, DEPTH, WIDTH, WIDTH)
    if case.whole:
        shape = block_shape
    x = hs.shard(torch.randn(shape), grid, check=False)  # each rank draws its own
    if case.whole:
        x = hs.gather(x, "depth")
    cut = Side(case, x.local.detach().requires_grad_(), x)
    plain = Side(case, torch.randn(block_shape, requires_grad=True))
    best = [[float("inf")] * 3 for _ in range(2)]
    for turn in range(WARM_UP + rounds):
        alone = plain.seconds(calls, [0.0])
        grid.barrier()
        together = cut.seconds(calls, grid.spent)
        if turn >= WARM_UP:
            for found, a, b in zip(best, alone, together, strict=True):
                found[:] = map(min, found, (a[0], b[0], b[1]))
    kernels = cut.kernels(calls)
    seconds = [t for found, alone in zip(best, kernels, strict=True) for t in (*found, alone)]
    if grid.size > 1:
        seconds = slowest(seconds, grid.device)
    times = [1e6 * t for t in seconds]
    return {"forward": Times(*times[:4]), "backward": Times(*times[4:])}


def on_ranks(options: argparse.Namespace, size: int) -> dict[str, Any]:
    """Every operator."""
    torch.manual_seed(0)
    grid = TimedGrid(depth=size)
    gc.disable()
    return {
        name: measure(case, grid, options.calls, options.rounds)
        for name, case in cases().items()
        if name in options.op
    }


def calls_of_rules() -> dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Family, function and operands of every rule that can be called with a few operands.

    The first form that runs on a plain tensor and on one that is cut over one rank. Operators in
    place are left out, and those of `operator_cases`, which need weights, are added.
    """
    x = torch.rand(1, CHANNELS, DEPTH, WIDTH, WIDTH) + 0.5
    forms: list[tuple[Any, ...]] = [
        (x,), (x, x), (x, x, x), (x, 2.0), (x, 1), (x, 2), (x, 0.2, 0.8), (x, (2, 3)), (x, 1, 2),
        (x, 2, 1, 2), ([x, x],), (x, 1, x), (x, x > 1, 0.0), (x > 1, x, x), (x, (1, 1)),
        (x, [1, 1], [2, 3]), (x, x.shape), (x > 1,), (x > 1, x > 1), (x, torch.float64),
    ]  # fmt: skip
    found: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {}
    for function, rule in RULES.items():
        name = op_name(function)
        if (name.endswith("_") and not name.endswith("__")) or "__i" in name or name in found:
            continue
        for form in forms:
            operands = copy.deepcopy(form)  # some forms change their operands in place
            try:
                function(*operands)
                result = function(*cut_alike(operands))
            except Exception:  # it takes other operands
                continue
            if result is not NotImplemented:
                found[name] = (rule.family, function, operands)
                break
    for name, case in cases().items():
        weights = [torch.randn(shape) for shape in case.weights]
        if not case.labels and not case.whole:
            found[name] = ("layers", case.run, (x, *weights))
    return found


def cut_alike(value: Any) -> Any:
    """Volumes among the operands as tensors that are cut over one rank; anything else as it is."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(map(cut_alike, value))
    if not isinstance(value, torch.Tensor) or value.shape[-3:] != (DEPTH, WIDTH, WIDTH):
        return value
    return hs.Sharded.from_local(value, Partition.whole(tuple(value.shape)), one_rank())


@cache
def one_rank() -> hs.Grid:
    return hs.Grid()


def above_plain(calls: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds that each rule takes above plain torch, in the forward pass without a graph.

    CPU time, the best of several rounds in turn.
    """
    gc.disable()
    families: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for name, (family, function, operands) in calls_of_rules().items():
            sides = [partial(function, *values) for values in (operands, cut_alike(operands))]
            best = [float("inf")] * 2
            for _ in range(rounds):
                for side, run in enumerate(sides):
                    begin = time.process_time()
                    for _ in range(calls):
                        run()
                    best[side] = min(best[side], (time.process_time() - begin) / calls)
            families.setdefault(family, {})[name] = 1e6 * (best[1] - best[0])
    return families


def print_rules(families: dict[str, dict[str, float]]) -> None:
    count = sum(map(len, families.values()))
    print(f"{count} functions, microseconds above plain torch")
    print(f"{'':24}{'rules':>8}{'median':>8}{'most':>8}")
    for family, rules in sorted(families.items()):
        most = max(rules, key=lambda name: rules[name])
        middle = statistics.median(rules.values())
        print(f"{family:24}{len(rules):8}{middle:8.1f}{rules[most]:8.1f}  {most}")


def print_table(size: int, rows: dict[str, dict[str, Times]]) -> None:
    print(f"\n{size} ranks, blocks of {CHANNELS} x {DEPTH} x {WIDTH} x {WIDTH} [us]")
    print(f"{'':24}{'forward':^50}{'backward':^50}")
    columns = "".join(f"{word:>10}" for word in ("plain", "cut", "kernels", "overhead", "messages"))
    print(f"{'':24}{columns}{columns}")
    for name, passes in rows.items():
        cells = "".join(
            f"{t.plain:10.0f}{t.cut:10.0f}{t.kernels:10.0f}{t.overhead:10.0f}{t.message:10.0f}"
            for t in passes.values()
        )
        print(f"{name:24}{cells}")


def main() -> None:
    names = list(cases())
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--op", nargs="+", choices=names, default=names)
    parser.add_argument("--calls", type=int, default=40, help="of an operator in a row")
    parser.add_argument("--rounds", type=int, default=12, help="the best of them counts")
    parser.add_argument("--rules", action="store_true", help="all rules, on one rank")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = machine()
    results: dict[str, Any] = {}
    if options.rules:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        results["rules"] = above_plain(options.calls, options.rounds)
        print_rules(results["rules"])
    for size in () if options.rules else options.ranks:
        rows = run_ranks(size, on_ranks, options, size)[0]
        print_table(size, rows)
        results[str(size)] = {
            name: {
                which: asdict(times) | {"overhead": times.overhead}
                for which, times in passes.items()
            }
            for name, passes in rows.items()
        }
    write_results(options, where, {"us": results})


if __name__ == "__main__":
    main()
