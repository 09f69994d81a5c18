"""Compare an operator on cut tensors with plain torch on whole ones.

An operator under test is a function of plain torch calls, ``op(x, *weights, **options)``. The
same function runs on the whole tensors (the reference, in which hyperslab takes no part) and on
the cut ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.comm import exchange
from tests.gpus import SAMPLES_ON, making_tensors
from tests.selection import in_gate

RANKS = in_gate((1, 2, 3, 4, 6, 8), kept=(1, 2, 8))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
SHARES = {1: 7, 2: 2, 6: 3, 8: 5}
"""By what the number of examples on so many ranks is divided in the gate."""

TOGETHER = 14  # examples that are drawn at a time
FEW = 2  # such draws, of which the first has the simplest examples alone
AXES = ("data", "depth", "height", "width")


@dataclass(frozen=True)
class Example:
    """One call of an operator: where it runs and on what."""

    grid: Mapping[str, int]
    shape: tuple[int, ...]
    weights: tuple[tuple[int, ...] | None, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    rounded: torch.dtype | None = None  # to this one first
    channels_last: bool = False
    mean: float = 0.0
    seed: int = 0


def draw_examples(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """The same ``count`` examples on every run, to be sent to the ranks in one call.

    In the gate half of them on two ranks, a third on six and a fifth on eight, where one takes as
    long as on all other numbers together, and a seventh on one, where nothing is cut; the long run
    has all.
    Hypothesis often repeats most of what it drew before, and running an example takes ten times as
    long as drawing it: of three times as many these are the ones that cover most. Many are drawn at
    a time, which takes half as long and makes them more different.
    """
    examples = some_of(strategy, FEW)
    if isinstance(examples[0], Example) and settings.default.derandomize:  # the gate's profile
        count //= SHARES.get(math.prod(examples[0].grid.values()), 1)
    if 3 * count > FEW * TOGETHER:
        examples = some_of(strategy, math.ceil(3 * count / TOGETHER))
    return covering(examples, count)


def some_of(strategy: st.SearchStrategy[Any], times: int) -> list[Any]:
    """The different ones among so many times `TOGETHER` examples."""
    found: dict[str, Any] = {}

    @settings(
        max_examples=times,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(*[strategy] * TOGETHER))
    def collect(examples: tuple[Any, ...]) -> None:
        found.update((repr(example), example) for example in examples)

    collect()
    return list(found.values())


def covering(examples: list[Any], count: int) -> list[Any]:
    """One by one the example with the most pairs of traits that none before it has."""
    chosen, seen = [], set[Hashable]()
    rest = [(example, {*itertools.combinations(traits(example), 2)}) for example in examples]
    while rest and len(chosen) < count:
        fresh = [len(pairs - seen) for _, pairs in rest]
        example, pairs = rest.pop(fresh.index(max(fresh)))
        chosen.append(example)
        seen |= pairs
    return chosen


def traits(example: Any) -> list[Hashable]:
    """How each dim is cut, every option, and the other fields: all pairs of these are wanted."""
    if not isinstance(example, Example):
        return [repr(example)]
    names = ("dtype", "rounded", "channels_last", "mean")
    fields: dict[str, Any] = {name: getattr(example, name) for name in names}
    fields |= {"dims": len(example.shape), "weights": [w is None for w in example.weights]}
    for name, value in example.options.items():
        if "seed" not in name:
            several = value if isinstance(value, (list, tuple)) else [value]
            fields[f"option {name}"] = sorted({repr(one) for one in several})
    for axis, extent in zip(AXES[::-1], [*example.shape[:1:-1], 0, 0][:3], strict=False):
        fields[axis] = cut_of(extent, example.grid.get(axis, 1))
    fields["data"] = cut_of(example.shape[0], example.grid.get("data", 1))
    return [(name, repr(value)) for name, value in fields.items()]


def cut_of(extent: int, parts: int) -> str:
    """How a dim of this extent is cut."""
    if parts == 1:
        return "whole"
    if extent < parts:
        return "some have none"
    return "evenly" if extent % parts == 0 else "unevenly"


@functools.cache
def grids(ranks: int) -> st.SearchStrategy[dict[str, int]]:
    """Every way to arrange the ranks on four axes."""
    extents = itertools.product(range(1, ranks + 1), repeat=4)
    found = [dict(zip(AXES, e, strict=True)) for e in extents if e[0] * e[1] * e[2] * e[3] == ranks]
    return st.sampled_from(found)


def parts_of(grid: Mapping[str, int], n: int) -> tuple[int, ...]:
    """How often each of ``n`` spatial dims is cut."""
    return tuple(grid[axis] for axis in AXES[-n:])


dtypes = st.sampled_from([torch.float64, torch.float64, torch.float32])


def compare(op: Callable[..., Any], examples: list[Example]) -> None:
    """Run all examples on this rank; the failures of all of them make one error.

    Examples with equal axes share a grid, as the layers of a network do.
    """
    serial, parallel = references(op, examples), []
    shared: dict[str, hs.Grid] = {}
    for example in examples:
        axes = str(example.grid)
        grid = shared.get(axes) or hs.Grid(**example.grid)
        shared[axes] = grid
        parallel.append(run(op, example, lambda x, grid=grid: hs.shard(x, grid)))
    average_weights(parallel)
    failures = [
        f"{op.__name__} {example}: {name}: {distance(found[name], value):.1e}"
        for example, expected, found in zip(examples, serial, parallel, strict=True)
        for name, value in expected.items()
        # Far from zero the serial run, too, has fewer digits.
        if not distance(found[name], value) <= TOLERANCE[example.dtype] * (1 + abs(example.mean))
        and not as_near_as_rounding_lets_it(op, example, name, found[name], value)
    ]
    assert not failures, "\n".join([f"{len(failures)} differences", *failures[:10]])


def compare_piece_by_piece(op: Callable[..., Any], examples: list[Example]) -> None:
    """Compare as `compare`, with halos put together as those of larger boxes are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "FEW_ELEMENTS", 0)
        compare(op, examples)


def references(
    op: Callable[..., Any], examples: list[Example]
) -> list[dict[str, torch.Tensor | None]]:
    """The serial runs of all examples, which the ranks share out and then hand to each other."""
    if not dist.is_initialized():  # in the tests' own process
        return [run(op, example, lambda x: x) for example in examples]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = [run(op, example, lambda x: x) for example in examples[rank::ranks]]
    of_ranks: list[Any] = [mine] * ranks
    dist.all_gather_object(of_ranks, [_light(found) for found in mine])
    return [_heavy(of_ranks[i % ranks][i // ranks]) for i in range(len(examples))]


def _light(found: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
    """To pickle an array takes a fifteenth of what a tensor takes; not every type has one."""
    light = dict[str, Any](found)
    for name, value in found.items():
        if value is not None and value.is_cpu and value.dtype in TOLERANCE:
            light[name] = value.numpy()
    return light


def _heavy(found: Mapping[str, Any]) -> dict[str, torch.Tensor | None]:
    return {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in found.items()}


def as_near_as_rounding_lets_it(
    op: Callable[..., Any],
    example: Example,
    name: str,
    found: torch.Tensor | None,
    expected: torch.Tensor | None,
) -> bool:
    """Whether a result of float32 is as near to the serial one of float64 as it can be.

    Where a sum cancels (a mean of normalised values, the gradient of a norm over few) the serial
    run itself has fewer digits than the tolerance asks for, and it is chance whose are more. The
    result may be as far off as serial float32, or as a few times what rounding the operands does.
    """
    if example.dtype == torch.float64 or found is None or expected is None:
        return False
    wider = replace(example, dtype=torch.float64, rounded=example.dtype)
    exact = run(op, wider, lambda x: x)[name]
    moved = run(functools.partial(on_moved_operands, op), wider, lambda x: x)[name]
    assert exact is not None
    limit = max(distance(expected.double(), exact), 4 * distance(moved, exact))
    return distance(found.double(), exact) <= limit


def on_moved_operands(op: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """Call ``op`` with operands that differ by as much as those rounded to float32."""
    generator = torch.Generator().manual_seed(0)

    def moved(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
        return x * (1 + noise * 2**-24)

    return op(*map(moved, operands), **options)


def distance(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Relative L2; infinite where one is missing or the shapes or types differ."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    error, norm = (found - expected).norm().item(), expected.norm().item()
    return error / norm if norm > 0 else error


def run(
    op: Callable[..., Any], example: Example, cut: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Output, input gradient and the weights' gradients of this rank."""
    x, weights = inputs(example)
    given = cut(x)
    with making_tensors():
        y = op(given, *weights, **example.options)
    whole = y.full() if isinstance(y, hs.Sharded) else y
    generator = torch.Generator().manual_seed(example.seed + 1)
    functional = torch.randn(whole.shape, generator=generator, dtype=example.rounded or whole.dtype)
    (whole * functional.to(whole.device)).sum().backward()
    found = {"output": whole.detach(), "input gradient": x.grad}
    for index, weight in enumerate(w for w in weights if w is not None):
        found[f"gradient of weight {index}"] = weight.grad
    return found


def average_weights(parallel: list[dict[str, torch.Tensor | None]]) -> None:
    """Average the weights' gradients of all examples at once: gloo answers after milliseconds."""
    names = [(f, n) for f in parallel for n in f if "weight" in n and f[n] is not None]
    if not names:
        return
    flat = [found[name].double().reshape(-1) for found, name in names]  # type: ignore[union-attr]
    means = average(torch.cat(flat)).split([len(part) for part in flat])  # type: ignore[union-attr]
    for (found, name), mean in zip(names, means, strict=True):
        found[name] = mean.view(found[name].shape).to(found[name].dtype)  # type: ignore[union-attr]


def average(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Over all ranks, as DistributedDataParallel does."""
    if gradient is None or not dist.is_initialized():
        return gradient
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def inputs(example: Example) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Leaves that require gradients, equal on all ranks."""
    generator = torch.Generator().manual_seed(example.seed)

    def leaf(shape: tuple[int, ...], mean: float = 0.0) -> torch.Tensor:
        value = torch.randn(shape, generator=generator, dtype=torch.float64) + mean
        return value.to(example.rounded or example.dtype).to(SAMPLES_ON, example.dtype)

    x = leaf(example.shape, example.mean)
    if example.channels_last:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        x = x.to(memory_format=formats[x.dim()])
    weights = [None if shape is None else leaf(shape).requires_grad_() for shape in example.weights]
    return x.requires_grad_(), weights
