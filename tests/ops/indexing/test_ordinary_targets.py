"""Cut values written into ordinary tensors: as serially, or refused (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks
from tests.selection import in_gate


def written(
    x: Any, *, shape: tuple[int, ...], index: tuple[Any, ...], twice: bool, seed: int
) -> Any:
    """Into a part of a fresh tensor, once more into another one, and read there."""
    x = recut(x, seed)
    y = torch.ones(shape, dtype=x.dtype)
    y[index] = x
    if twice:
        y[(slice(None), slice(0, 1))] = (
            x[:, :1].sum(dim=tuple(range(2, x.dim()))).reshape(-1, 1, *[1] * (len(shape) - 2))
        )
    return y * torch.linspace(1, 2, math.prod(shape), dtype=x.dtype).view(shape)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    """Low modes, the middle, every other element, one slice, or all of it."""
    n = draw(st.sampled_from([1, 2, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(p, p + 3)) for p in parts_of(grid, n)]
    batch = draw(st.integers(grid["data"], grid["data"] + 1))
    shape, index = [batch, 3], [slice(None), slice(None)]
    for extent in extents:
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        step = draw(st.sampled_from([1, 1, 2]))
        shape.append(before + step * extent + after)
        index.append(slice(before, before + step * extent, step))
    if draw(st.booleans()):
        shape.insert(2, 2)
        index.insert(2, 1)
    options = {"shape": tuple(shape), "index": tuple(index), "twice": draw(st.booleans())}
    return Example(
        grid=grid,
        shape=(batch, 3, *extents),
        options={**options, "seed": draw(st.integers(0, 5))},
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", in_gate([1, 2, 3, 4, 6], kept=[1, 2, 6]))
def test_equal_to_serial(ranks: int) -> None:
    run_ranks(ranks, compare, written, draw_examples(examples(ranks), 20))


def added_to_a_part(x: Any, *, index: tuple[Any, ...]) -> Any:
    """Which Python reads, changes in place, and writes back."""
    y = x * 2
    y[index] += x[:, 1:2].sum(1)
    y[index] = y.detach()[index]
    y[:, 2] -= x[:, 0]
    return y * y


@pytest.mark.parametrize("axes", [{"data": 2}, {"depth": 2}, {"depth": 2, "width": 2}], ids=str)
def test_one_sample_a_rank(axes: dict[str, int]) -> None:
    shape = (axes.get("data", 1), 3, 4, 3, 2)
    places = [(slice(None), 0), (slice(None), -1), (..., 1, slice(None), slice(None), slice(None))]
    examples = [Example(axes, shape, options={"index": index}) for index in places]
    run_ranks(math.prod(axes.values()), compare, added_to_a_part, examples)


def refused(case: str) -> None:
    x = hs.shard(torch.randn(2, 3, 6, 4), hs.Grid(width=2))
    fresh = torch.zeros(2, 3, 6, 4)
    view = fresh[:1]
    target: Any = {
        "a view": view,
        "of which there is a view": fresh,
        "a parameter": nn.Parameter(torch.zeros(2, 3, 6, 4)).detach().requires_grad_(),
        "of numpy": torch.from_numpy(torch.zeros(2, 3, 6, 4).numpy()),
        "saved": torch.zeros(2, 3, 6, 4),
    }[case]
    kept = target * torch.ones((), requires_grad=True) if case == "saved" else None
    with torch.no_grad():
        target[:] = x[: len(target)]
    assert kept is None


CASES = ["a view", "of which there is a view", "a parameter", "of numpy", "saved"]


@pytest.mark.parametrize("case", CASES)
def test_what_somebody_else_sees_is_refused(case: str) -> None:
    with pytest.raises(hs.LayoutError, match=r"(?s)shares its memory.*x\.full\(\)"):
        run_ranks(2, refused, case)


class Averaged(nn.Module):
    """Keeps moving averages, in place, of what it sees: whole and number by number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("middle", torch.zeros(2, 3))
        self.register_buffer("rows", torch.zeros(4, 3))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            means = x.mean((2, 3, 4))  # not cut where the batch is not
            self.mean.mul_(0.5).add_(means.mean(0), alpha=0.5)
            self.middle.data.mul_(0.5).add_(means * 0.5)
            self.rows[1:3] = means
            self.rows.data[3:].copy_(means[:1])
        return x * self.mean.view(3, 1, 1, 1) + self.middle.sum() + self.rows.sum()


def averages(axes: dict[str, int] | None) -> list[torch.Tensor]:
    module, x = Averaged(), torch.randn(2, 3, 8, 4, 4, dtype=torch.float32)
    if axes is not None:
        grid = hs.Grid(**axes)
        hs.parallelize(module, grid)
        x = hs.shard(x, grid)
    for step in range(2):
        y = module(x * (step + 1))
    whole = y.full() if isinstance(y, hs.Sharded) else y
    assert all(type(b) is torch.Tensor for b in module.buffers())
    return [whole, *module.buffers()]


def test_buffers_change_in_place() -> None:
    expected = run_ranks(1, averages, None)[0]
    for found in run_ranks(4, averages, {"depth": 2, "width": 2}):
        for got, want in zip(found, expected, strict=True):
            assert torch.allclose(got, want, atol=1e-6)
