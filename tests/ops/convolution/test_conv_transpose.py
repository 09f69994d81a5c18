"""Transposed convolutions equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.comm import communicator
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

COVERS = {"convolution": {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}}

TRANSPOSED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


def transposed(x: Any, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> Any:
    return TRANSPOSED[x.dim()](x, weight, bias, **options)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    """Overlapping windows and gaps between them, every crop, shards down to one element."""
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    kernel = [draw(st.integers(1, 5 if n < 3 else 4)) for _ in range(n)]
    stride = [draw(st.integers(1, 3)) for _ in range(n)]
    dilation = [draw(st.sampled_from([1, 1, 2, 3])) for _ in range(n)]
    extra = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    padding = [draw(st.integers(0, 3)) for _ in range(n)]
    extents = []
    for parts, k, s, d, e, p in zip(
        parts_of(grid, n), kernel, stride, dilation, extra, padding, strict=True
    ):
        made = (k - 1) * d + 1 + e - 2 * p  # by one input
        least = max(parts, 1 + -((made - 1) // s))
        extents.append(draw(st.integers(least, least + (9 if n < 3 else 6))))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inner, outer = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return Example(
        grid=grid,
        shape=(draw(st.integers(1, 3)), groups * inner, *extents),
        weights=(
            (groups * inner, outer, *kernel),
            (groups * outer,) if draw(st.booleans()) else None,
        ),
        options={
            "stride": stride,
            "padding": padding,
            "output_padding": extra,
            "groups": groups,
            "dilation": dilation,
        },
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_transposed_convolution(ranks: int) -> None:
    run_ranks(ranks, compare, transposed, draw_examples(examples(ranks), 28))


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_larger_boxes(ranks: int) -> None:
    run_ranks(ranks, compare_piece_by_piece, transposed, draw_examples(examples(ranks), 14))


def upsampled(x: Any, kernel: int, stride: int, padding: int, extra: int) -> Any:
    layer = nn.ConvTranspose3d(1, 1, kernel, stride, padding, extra)
    return layer(x)


def follow() -> list[tuple[tuple[int, ...], ...]]:
    """The cuts of maps that are doubled, of one cut (5, 3)."""
    x = torch.randn(1, 1, 13, 4, 4)
    cut = hs.shard(x, hs.Grid(depth=3))
    found = []
    for layer in ((2, 2, 0, 0), (3, 2, 1, 1), (4, 2, 1, 0), (3, 1, 1, 0), (1, 2, 0, 1)):
        first = upsampled(cut, *layer).partition.cuts[2]
        assert first is not None
        found.append(first.bounds)
    return found


def test_the_cut_of_the_output_follows_that_of_the_input() -> None:
    doubled = (0, 10, 18, 26)
    assert run_ranks(3, follow) == [[doubled, doubled, doubled, (0, 5, 9, 13), doubled]] * 3


def silent() -> bool:
    """Upsampling as in a U-Net, with every way to send a message taken away."""
    grid = hs.Grid(depth=2, height=2)
    full = torch.randn(2, 3, 5, 7, 4)
    x = hs.shard(full, grid).local.clone().requires_grad_()
    cut = hs.Sharded.from_local(x, grid.partition(full.shape), grid)
    layer = nn.ConvTranspose3d(3, 2, 2, stride=2)
    kept = communicator.PendingMessages
    communicator.PendingMessages = None  # type: ignore[assignment, misc]
    saved: list[int] = []

    def save(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.untyped_storage().data_ptr())
        return t

    try:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            y = layer(cut)
        y.local.sum().backward()
    finally:
        communicator.PendingMessages = kept  # type: ignore[misc]
    theirs = {t.untyped_storage().data_ptr() for t in (x, layer.weight)}
    return x.grad is not None and set(saved) == theirs and y.local.is_contiguous()


def test_a_kernel_as_wide_as_the_stride_sends_and_copies_nothing() -> None:
    assert run_ranks(4, silent) == [True] * 4


def kept_bytes() -> int:
    """Bytes that an overlapping window saves beyond the block and the weight."""
    full = torch.randn(1, 2, 8, 4, 4)
    cut = hs.shard(full.requires_grad_(), hs.Grid(depth=2))
    layer = nn.ConvTranspose3d(2, 2, 3, stride=2, padding=1, output_padding=1)
    theirs = {t.untyped_storage().data_ptr() for t in (cut.local, layer.weight)}
    saved: dict[int, int] = {}

    def save(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        layer(cut)
    return sum(size for place, size in saved.items() if place not in theirs)


def test_only_the_halo_is_saved_besides_the_block() -> None:
    """Only the first of two ranks reads a plane of 2 x 4 x 4 numbers beyond its block."""
    assert run_ranks(2, kept_bytes) == [2 * 4 * 4 * 4, 0]


def formats() -> list[bool]:
    x = torch.randn(2, 4, 8, 6, 6).to(memory_format=torch.channels_last_3d)
    cut = hs.shard(x, hs.Grid(depth=2))
    weight = torch.randn(4, 4, 3, 3, 3)
    found = [F.conv_transpose3d(cut, weight[..., :k, :k, :k], stride=2) for k in (2, 3)]
    return [y.is_contiguous(memory_format=torch.channels_last_3d) for y in found]


def test_the_memory_format_is_kept() -> None:
    assert run_ranks(2, formats) == [[True, True]] * 2


def in_autocast(kernel: int) -> float:
    grid, layer = hs.Grid(depth=2), nn.ConvTranspose3d(3, 4, kernel, stride=2)
    x = torch.randn(2, 3, 6, 5, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want, found = layer(x), layer(hs.shard(x, grid))
    assert want.dtype == found.dtype == torch.bfloat16
    return float((want - found.full()).norm() / want.norm())


@pytest.mark.parametrize("kernel", [2, 3])
def test_autocast_casts_as_torch_does(kernel: int) -> None:
    assert max(run_ranks(2, in_autocast, kernel)) < 1e-2


def module_with_size(size: tuple[int, ...]) -> bool:
    """``output_size`` is a global extent, from which the module takes its output_padding."""
    layer = nn.ConvTranspose3d(2, 1, 3, stride=2, padding=1)
    x = torch.randn(1, 2, 5, 4, 3)
    y = layer(hs.shard(x, hs.Grid(depth=2)), output_size=size)
    return torch.allclose(y.full(), layer(x, output_size=size), atol=1e-6)


@pytest.mark.parametrize("size", [(9, 7, 5), (10, 8, 6)])
def test_output_size(size: tuple[int, ...]) -> None:
    assert run_ranks(2, module_with_size, size) == [True, True]


def cut() -> Any:
    return hs.shard(torch.randn(2, 2, 6, 6, 6), hs.Grid(depth=2))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: F.conv_transpose2d(cut(), torch.randn(2, 2, 3, 3)), "batched input of 4 dims"),
    (
        lambda: F.conv_transpose3d(torch.randn(2, 2, 6, 6, 6), cut()),
        "the input must be the cut tensor",
    ),
    (
        lambda: F.conv_transpose3d(cut(), torch.randn(2, 2, 1, 1, 1), padding=3),
        "conv_transpose3d: an output .* would be empty",
    ),
    (
        lambda: F.conv_transpose3d(cut(), torch.randn(2, 2, 2, 2, 2), output_padding=1),
        "output_padding must be smaller than stride or dilation",
    ),
]


def refused(case: int) -> None:
    REFUSED[case][0]()


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_refused(case: int) -> None:
    with pytest.raises(ValueError, match=REFUSED[case][1]):
        run_ranks(2, refused, case)
