"""Padding equals the serial one, and so does convolution with a padding mode (tier: a few gloo
ranks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks
from tests.selection import by_rotation

COVERS = {"spatial": {"pad", "constant_pad_nd"}}


def pad(x: Any, **options: Any) -> Any:
    return F.pad(x, **options)


@st.composite
def examples(draw: st.DrawFn, ranks: int, mode: str) -> Example:
    """Padding up to the extent and beyond, cropping at either end, thin shards."""
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(max(2, parts), parts + 8)) for parts in parts_of(grid, n)]
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *extents)
    dims = n
    if mode == "constant":  # any number of dims, batch and channel too
        dims = draw(st.integers(1, n + 2))
    pads: list[int] = []
    for extent in shape[::-1][:dims]:
        most = {"constant": 5, "replicate": 5, "reflect": extent - 1, "circular": extent}[mode]
        before = draw(st.integers(-(extent // 2), min(most, 5)))
        after = draw(st.integers(-((extent - 1) // 2), min(most, 5)))
        if mode == "circular":  # as often as the cropped extent allows
            cropped = extent + min(0, before) + min(0, after)
            before, after = min(before, cropped), min(after, cropped)
        if mode == "reflect" and draw(st.booleans()):
            before, after = max(0, before), max(0, after)
        pads += [before, after]
    options = {"pad": pads, "mode": mode}
    if mode == "constant":
        options["value"] = draw(st.sampled_from([None, 0, 1.5]))
    return Example(
        grid=grid,
        shape=shape,
        options=options,
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("ranks", RANKS)
def test_any_padding(ranks: int, mode: str) -> None:
    run_ranks(ranks, compare, pad, draw_examples(examples(ranks, mode), 28))


def convolved(x: Any, weight: torch.Tensor, bias: torch.Tensor, mode: str, **options: Any) -> Any:
    layer = nn.Conv3d(1, 1, 1, padding_mode=mode, **options)
    layer._parameters.clear()
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    layer.kernel_size = tuple(weight.shape[2:])  # type: ignore[assignment]
    layer._reversed_padding_repeated_twice = [p for p in layer.padding[::-1] for _ in range(2)]
    return layer(x)


@pytest.mark.parametrize(
    ("mode", "ranks"), by_rotation(["circular", "reflect", "replicate"], [2, 3, 8])
)
def test_convolution_with_a_padding_mode(ranks: int, mode: str) -> None:
    layers = [((3, 3, 3), (1, 1, 1), 1), ((3, 1, 5), (1, 0, 2), 2), ((2, 4, 3), (1, 2, 2), 1)]
    cases = [
        Example(
            grid=grid,
            shape=(2, 2, 9, 8, 10),
            weights=((3, 2, *kernel), (3,)),
            options={"mode": mode, "padding": padding, "stride": stride},
        )
        for kernel, padding, stride in layers
        for grid in (
            {"depth": ranks},
            {"width": ranks},
            {"data": ranks // 2 or 1, "height": ranks // (ranks // 2 or 1)},
        )
        if grid.get("data", 1) * grid.get("height", 1) in (1, ranks)
    ]
    run_ranks(ranks, compare, convolved, cases)


def modules() -> list[bool]:
    grid = hs.Grid(depth=2)
    x = torch.randn(1, 2, 5, 4, 4)
    layers = [
        nn.ConstantPad3d((1, 0, 2, 0, 1, 3), 2.5),
        nn.ZeroPad3d(2),
        nn.ReflectionPad3d((0, 1, 2, 1, 3, 2)),
        nn.ReplicationPad3d((1, 1, 0, 2, 4, 0)),
        nn.CircularPad3d((0, 1, 2, 0, 3, 5)),
    ]
    cut = hs.shard(x, grid)
    found = [torch.equal(layer(cut).full(), layer(x)) for layer in layers]
    constant = torch.constant_pad_nd(cut, (0, 0, 0, 0, -1, 2), 3.0)
    found.append(torch.equal(constant.full(), torch.constant_pad_nd(x, (0, 0, 0, 0, -1, 2), 3.0)))
    labels = torch.randint(0, 9, (2, 6, 4, 4))
    padded = F.pad(hs.shard(labels, grid, channels=False), (1, 1, 0, 0, 2, 0), value=7)
    found.append(torch.equal(padded.full(), F.pad(labels, (1, 1, 0, 0, 2, 0), value=7)))
    return found


def test_the_modules_and_labels() -> None:
    assert run_ranks(2, modules) == [[True] * 7] * 2


def boundaries() -> list[tuple[int, ...]]:
    x = hs.shard(torch.randn(1, 1, 9, 4, 4), hs.Grid(depth=3))
    found = []
    for mode in ("constant", "reflect", "replicate", "circular"):
        cut = F.pad(x, (0, 0, 0, 0, 2, 1), mode).partition.cuts[2]
        assert cut is not None
        found.append(cut.bounds)
    return found


def test_the_cut_stays_where_it_is() -> None:
    assert run_ranks(3, boundaries) == [[(0, 5, 8, 12)] * 4] * 3


def changed(mode: str, pads: tuple[int, ...]) -> bool:
    """Whether to change the result in place changes the input, as it never does serially."""
    x = torch.randn(1, 1, 6, 4, 4)
    cut = hs.shard(x, hs.Grid(depth=3))
    with torch.inference_mode():
        F.pad(cut, pads, mode).zero_()
    return not torch.equal(cut.full(), x)


@pytest.mark.parametrize("pads", [(0,) * 6, (0, 0, 0, 0, 1, 1), (1, 1, 0, 0, 0, 0), (-1,) * 6])
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_the_result_is_never_a_view(mode: str, pads: tuple[int, ...]) -> None:
    assert run_ranks(3, changed, mode, pads) == [False] * 3


def formats() -> list[bool]:
    x = torch.randn(2, 4, 8, 6, 6).to(memory_format=torch.channels_last_3d)
    cut = hs.shard(x, hs.Grid(depth=2))
    # Torch's circular padding forgets it, too.
    found = [F.pad(cut, (1, 1, 1, 1, 1, 1), mode) for mode in ("constant", "replicate", "reflect")]
    return [y.is_contiguous(memory_format=torch.channels_last_3d) for y in found]


def test_the_memory_format_is_kept() -> None:
    assert run_ranks(2, formats) == [[True] * 3] * 2


def cut() -> Any:
    return hs.shard(torch.randn(2, 2, 6, 6, 6), hs.Grid(depth=2))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: F.pad(cut(), (0, 0, 0, 0, 6, 0), "reflect"), "Padding size should be less than"),
    (lambda: F.pad(cut(), (0, 0, 0, 0, 7, 0), "circular"), "wrapping around more than once"),
    (lambda: F.pad(cut(), (0, 0, 0, 0, 5, -3), "circular"), "5 and 0 planes of circular padding"),
    (lambda: F.pad(cut(), (0, 0, 0, 0, -4, -3)), "negative output size"),
    (lambda: F.pad(cut(), (1, 1, 1), "constant"), "Padding length must be divisible by 2"),
    (lambda: F.pad(cut(), (1, 1), "mirror"), "Unrecognised padding mode mirror|mirror"),
]


def refused(case: int) -> None:
    REFUSED[case][0]()


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_refused(case: int) -> None:
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=REFUSED[case][1]):
        run_ranks(2, refused, case)
