"""Convolutions equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.serial import (
    RANKS,
    Example,
    compare,
    compare_piece_by_piece,
    draw_examples,
    dtypes,
    grids,
    parts_of,
)
from tests.ranks import run_ranks

COVERS = {"convolution": {"conv1d", "conv2d", "conv3d"}}

CONV = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def conv(x: Any, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> Any:
    return CONV[x.dim()](x, weight, bias, **options)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    """Kernels 1 to 5, strides 1 to 3, dilations 1 and 2, every padding, extents down to one
    output a rank or fewer."""
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    per_dim = st.integers(1, 5) if n < 3 else st.integers(1, 4)
    kernel = [draw(per_dim) for _ in range(n)]
    dilation = [draw(st.integers(1, 2)) for _ in range(n)]
    stride = [draw(st.integers(1, 3)) for _ in range(n)]
    padding: Any = draw(st.sampled_from(["same", "valid", "half", "any", "number"]))
    if padding == "same":
        stride = [1] * n
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    pads = [0] * n
    if padding == "half":
        pads = padding = [s // 2 for s in spans]
    elif padding == "any":
        pads = padding = [draw(st.integers(0, 3)) for _ in range(n)]
    elif padding == "number":
        padding = draw(st.integers(0, 2))
        pads = [padding] * n
    least = [
        max(parts, 1 if padding == "same" else span - 2 * pad)
        for parts, span, pad in zip(parts_of(grid, n), spans, pads, strict=True)
    ]
    extents = [draw(st.integers(low, low + 9)) for low in least]
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inner, outer = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return Example(
        grid=grid,
        shape=(draw(st.integers(1, 3)), groups * inner, *extents),
        weights=(
            (groups * outer, inner, *kernel),
            (groups * outer,) if draw(st.booleans()) else None,
        ),
        options={"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_convolution(ranks: int) -> None:
    run_ranks(ranks, compare, conv, draw_examples(examples(ranks), 28))


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_larger_boxes(ranks: int) -> None:
    run_ranks(ranks, compare_piece_by_piece, conv, draw_examples(examples(ranks), 14))


def test_windows_that_line_up_with_the_cut() -> None:
    """The path of slabs, on every cut of eight ranks, with several halo planes.

    Each cut and each layer is in both memory formats, in turn.
    """
    cuts = [(2, 1, 1), (1, 4, 1), (1, 2, 2), (2, 2, 2), (2, 1, 4)]
    layers = [(3, 1, 1), (3, 2, 1), (5, 1, 1), (3, 1, 2), (1, 1, 1), (1, 2, 1)]
    cases = [
        Example(
            grid={"data": 8 // (a * b * c), "depth": a, "height": b, "width": c},
            shape=(2, 2, 8, 8, 16),
            weights=((3, 2, k, k, k), (3,)),
            options={"stride": s, "padding": d * (k - 1) // 2, "dilation": d},
            channels_last=(turn + place) % 2 == 1,
        )
        for turn, (a, b, c) in enumerate(cuts)
        for place, (k, s, d) in enumerate(layers)
    ]
    run_ranks(8, compare, conv, cases)


def test_a_halo_that_reaches_over_several_neighbours() -> None:
    cases = [
        Example(
            grid={"width": 6},
            shape=(1, 2, extent),
            weights=((2, 2, k), None),
            options={"padding": k // 2, "dilation": d},
        )
        for extent in (6, 7, 11, 12)
        for k, d in [(5, 2), (5, 1), (9, 1), (4, 2)]
        if extent + 2 * (k // 2) > (k - 1) * d
    ]
    run_ranks(6, compare, conv, cases)


def formats() -> tuple[bool, bool]:
    grid = hs.Grid(depth=2)
    x = torch.randn(2, 4, 8, 6, 6).to(memory_format=torch.channels_last_3d)
    weight = torch.randn(4, 4, 3, 3, 3).to(memory_format=torch.channels_last_3d)
    y = F.conv3d(hs.shard(x, grid), weight, padding=1)
    z = F.conv3d(hs.shard(x, grid), weight)  # not aligned: the halo buffer
    kept = [v.is_contiguous(memory_format=torch.channels_last_3d) for v in (y, z)]
    return kept[0], kept[1]


def test_the_memory_format_is_kept() -> None:
    assert run_ranks(2, formats) == [(True, True)] * 2


def refused(case: str) -> None:
    x = hs.shard(torch.randn(2, 2, 6, 6, 6), hs.Grid(depth=2))
    weight = torch.randn(2, 2, 3, 3, 3)
    if case == "unbatched":
        F.conv3d(hs.shard(torch.randn(2, 2, 6), hs.Grid(data=2)), weight)
    elif case == "volume":
        F.conv2d(x, torch.randn(2, 2, 3, 3))
    elif case == "large":
        F.conv3d(x, torch.randn(2, 2, 7, 3, 3))
    elif case == "cut weight":
        F.conv3d(torch.randn(2, 2, 6, 6, 6), hs.shard(weight, hs.Grid(depth=2)))
    elif case == "strided same":
        F.conv3d(x, weight, padding="same", stride=2)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unbatched", "conv3d needs a batched input of 5 dims, got .*\n.*unsqueeze"),
        ("volume", r"conv2d needs a batched input of 4 dims, got .*\n.*squeeze\(2\)"),
        ("large", "conv3d: the window is larger than the input 2 x 2 x 6 x 6 x 6"),
        ("cut weight", "the input must be the cut tensor"),
        ("strided same", "padding='same' is not supported for strided convolutions"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, refused, case)


def of_complex_numbers(
    x: Any, weight: torch.Tensor, bias: torch.Tensor, *, transposed: bool, groups: int
) -> Any:
    filters = torch.complex(weight, weight.flip(0))
    convolve = F.conv_transpose3d if transposed else F.conv3d
    offset = torch.complex(bias, -bias)
    y = convolve(torch.complex(x, x * x), filters, offset, stride=2, padding=1, groups=groups)
    return torch.view_as_real(y)


def test_convolutions_of_complex_numbers() -> None:
    for grid in ({"depth": 2}, {"height": 2}, {"data": 2}):
        examples = [
            Example(
                grid,
                (2, 4, 7, 6, 5),
                ((4, 4 // groups, 3, 3, 3), (4,)),
                {"transposed": transposed, "groups": groups},
            )
            for transposed in (False, True)
            for groups in (1, 2)
        ]
        run_ranks(2, compare, of_complex_numbers, examples)


def dynamic(x: Any, weight: torch.Tensor, *, transposed: bool, groups: int) -> Any:
    """Filters made of the features that they filter, as networks with attention over kernels do."""
    rate = x.mean((0, 2, 3, 4)).sum()
    filters, bias = weight * torch.sigmoid(rate + x.amax((2, 3, 4)).sum()), rate * weight.mean()
    own = x.mean((2, 3, 4), keepdim=True)[:1].mean(1, keepdim=True) * filters  # still a cut tensor
    operator = F.conv_transpose3d if transposed else F.conv3d
    return operator(x, own, (own * bias).mean((1, 2, 3, 4)), padding=1, groups=groups)


def test_filters_made_of_features() -> None:
    grid = {"data": 1, "depth": 2, "height": 2, "width": 1}
    examples = [
        Example(
            grid=grid,
            shape=(2, 4, 7, extent, 6),
            weights=((4, 4 // groups, 3, 3, 3),),
            options={"transposed": transposed, "groups": groups},
        )
        for transposed, groups, extent in [
            (False, 1, 9),
            (False, 2, 5),
            (True, 1, 6),
            (False, 1, 2),
        ]
    ]
    run_ranks(4, compare, dynamic, examples)


def of_no_sample(x: Any, weight: torch.Tensor, *, transposed: bool, padding: int) -> Any:
    """A mini-batch from which all samples were left out beside one that has them."""
    operator = F.conv_transpose3d if transposed else F.conv3d
    return torch.cat([operator(part, weight, padding=padding) for part in (x[:0], x)])


@pytest.mark.parametrize("axes", [{"depth": 2}, {"height": 2}], ids=str)
def test_no_sample(axes: dict[str, int]) -> None:
    examples = [
        Example(
            grid=axes,
            shape=(2, 4, 7, 6, 5),
            weights=((4, 4, 3, 3, 1),),
            options={"transposed": transposed, "padding": padding},
        )
        for transposed in (False, True)
        for padding in (0, 1)
    ]
    run_ranks(2, compare, of_no_sample, examples)
