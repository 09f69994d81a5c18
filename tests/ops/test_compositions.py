"""Operators of many families in a row, views, changes in place (tier: a few gloo ranks)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
import tests.ops.programs.map_steps
import tests.ops.programs.mixed_steps  # noqa: F401  both register their steps
from tests.ops.programs.aliases import run_aliases
from tests.ops.programs.programs import run_program
from tests.ranks import run_ranks
from tests.selection import in_gate

COVERS: dict[str, set[str]] = {"elementwise": {"contiguous"}}

LAYOUTS: list[dict[str, int]] = [
    {"depth": 2},
    {"width": 3},
    {"data": 2, "height": 2},
    {"depth": 2, "width": 2},
    {"data": 3, "depth": 2},
    {"depth": 2, "height": 2, "width": 2},
]
MODES = ("grad", "no_grad", "inference")

Result = tuple[list[str], list[str]]


def programs(layout: Mapping[str, int], seeds: range) -> list[Result]:
    grid = hs.Grid(**layout)
    return [run_program(seed, grid, 8) for seed in seeds]


def aliases(layout: Mapping[str, int], seeds: range) -> list[Result]:
    grid = hs.Grid(**layout)
    return [run_aliases(seed, grid, 12, MODES[seed % 3]) for seed in seeds]


def names(log: list[str]) -> list[str]:
    """Which steps ran and which were refused."""
    return [line.split("(")[0].split(":")[0] for line in log]


KINDS = [(programs, 5, 0.2), (aliases, 6, 0.3)]
CASES = [(*kind, layout) for kind in KINDS for layout in LAYOUTS]
IN_GATE = [
    *[(*KINDS[0], layout) for layout in (LAYOUTS[2], LAYOUTS[4])],
    *[(*KINDS[1], layout) for layout in (LAYOUTS[0], LAYOUTS[2])],
]


@pytest.mark.parametrize(
    ("run", "count", "refused", "layout"),
    in_gate(CASES, kept=IN_GATE),
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_programs_equal_the_serial_run(
    run: Callable[[Mapping[str, int], range], list[Result]],
    count: int,
    refused: float,
    layout: dict[str, int],
) -> None:
    ranks = torch.Size(layout.values()).numel()
    seed = 100 * LAYOUTS.index(layout)
    results = run_ranks(ranks, run, layout, range(seed, seed + count))
    for of_ranks in zip(*results, strict=True):
        log = of_ranks[0][0]
        assert all(not failures for _, failures in of_ranks), of_ranks
        assert all(names(other) == names(log) for other, _ in of_ranks), of_ranks
    steps = [name for log, _ in results[0] for name in names(log[1:])]
    assert sum(name.startswith("REFUSED") for name in steps) < refused * len(steps)


def uneven_batch(name: str) -> float:
    """Replicas with one sample and with two, of one element each."""
    x = torch.randn(5, 6, 1, 1, 1, dtype=torch.float64)
    norm: Any = {"group": lambda t: F.group_norm(t, 6), "layer": lambda t: F.layer_norm(t, (1,))}
    y = norm[name](hs.shard(x, hs.Grid(data=3)))
    return float((y.full() - norm[name](x)).abs().max())


@pytest.mark.parametrize("name", ["group", "layer"])
def test_ranks_judge_the_batch_alike(name: str) -> None:
    assert max(run_ranks(3, uneven_batch, name)) < 1e-12


def contiguous_part() -> list[Any]:
    """Serially each of these is a copy; the middle block, or one of a single plane, is not."""
    x = torch.arange(2 * 8 * 3.0).reshape(1, 2, 8, 1, 3)
    grid = hs.Grid(depth=4)
    cut = hs.shard(x, grid)
    part = cut[:, :, 1:7].contiguous()
    with pytest.raises(hs.LayoutError, match="a copy where serial torch"):
        part.mul_(2)
    thin = hs.shard(x[:, :1, :4], grid)
    thin.transpose(2, 4).contiguous().mul_(2)
    return [torch.equal(cut.full(), x), torch.equal(thin.full(), x[:, :1, :4])]


def test_contiguous_copies_where_the_whole_is_not() -> None:
    assert run_ranks(4, contiguous_part) == [[True, True]] * 4


THIN = {
    "contiguous": lambda y: y.contiguous(),
    "merge": lambda y: y.flatten(2, 3),
    "more": lambda y: y.reshape(*y.shape[:2], -1),
    "turned": lambda y: y.mT.contiguous(),
    "split": lambda y: y.unflatten(-1, (2, -1)),
}
MADE = {
    "itself": lambda y: y,
    "relu": torch.relu,
    "softmax": lambda y: y.softmax(1),
    "layer_norm": lambda y: F.layer_norm(y, y.shape[1:]),
}


def changed_beside_a_thin_shard(shape: tuple[int, ...], order: tuple[int, ...]) -> list[str]:
    """A view of a tensor, or a copy, that is changed: of one plane torch forgets the stride."""
    full, grid, failures = torch.randn(shape, dtype=torch.float64), hs.Grid(depth=2), []
    for made, view in itertools.product(MADE, THIN):
        ours, torchs = (MADE[made](x.permute(order) * 1) for x in (hs.shard(full, grid), full))
        THIN[view](torchs).mul_(3)
        try:
            THIN[view](ours).mul_(3)
            alike = torch.allclose(ours.full(), torchs, rtol=1e-12, atol=1e-12)
        except hs.LayoutError:
            continue
        if not alike:
            failures.append(f"{made} {view}")
    return failures


@pytest.mark.parametrize("order", [(0, 2, 1, 3, 4), (0, 2, 3, 4, 1), (2, 0, 1, 3, 4)])
def test_a_change_beside_a_thin_shard(order: tuple[int, ...]) -> None:
    assert run_ranks(2, changed_beside_a_thin_shard, (1, 2, 2, 3, 4), order) == [[]] * 2


def stale_in_inference(change: str) -> str:
    with torch.inference_mode():
        x = hs.shard(torch.ones(1, 1, 4, 3, 2), hs.Grid(depth=2)) * 1
        view, row = x[:], x.flatten()
        if change == "assign":
            view[0, 0, 0] = 3
        else:
            getattr(view, change)(2)
        with pytest.raises(hs.LayoutError) as error:
            row.sum()
        again = x.flatten().sum()
    assert isinstance(again, torch.Tensor)
    return str(error.value)


@pytest.mark.parametrize("change", ["mul_", "fill_", "assign"])
def test_a_stale_copy_is_refused_in_inference_mode_too(change: str) -> None:
    assert "was changed in place since" in run_ranks(2, stale_in_inference, change)[0]


def fill_in_place() -> bool:
    x = hs.shard(torch.ones(1, 2, 4, 3, 2), hs.Grid(depth=2)) * 1
    x.index_fill_(1, torch.tensor([1]), 5.0)
    return bool((x.full()[:, 1] == 5).all())


def test_positions_are_filled_in_place() -> None:
    assert all(run_ranks(2, fill_in_place))


def checkpointed_in_place() -> float:
    x = torch.randn(1, 2, 5, 4, 3, dtype=torch.float64)
    gradients = []
    for grid in (hs.Grid(depth=2), None):
        leaf = x.clone().requires_grad_()
        cut = leaf if grid is None else hs.shard(leaf, grid)
        y = checkpoint(lambda t: F.leaky_relu(t * 2, 0.1, inplace=True), cut, use_reentrant=False)
        assert isinstance(y, torch.Tensor)
        y.square().sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return float((gradients[0] - gradients[1]).abs().max())


def test_an_activation_in_place_may_be_checkpointed() -> None:
    assert max(run_ranks(2, checkpointed_in_place)) < 1e-12
