"""The limit of a step: its convolutions, their kernels, the sums (tier: a few gloo ranks)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_convolutions import LayerConvolution, block_of, noted
from block_kernels import PASSES, BlockConvolution, Operands, kernels, operands
from limit import extents_of, fastest_of, limit_of, measure
from own_kernels import is_own, own_kernels
from torch import nn

import hyperslab as hs
from hyperslab.kernels.compile import direct_is_known
from tests.ranks import run_ranks

PLAIN = BlockConvolution(
    x=(2, 6, 9, 5, 7),
    weight=(8, 6, 3, 3, 3),
    stride=(1, 1, 1),
    padding=(1, 1, 1),
    dilation=(1, 1, 1),
    output_padding=(0, 0, 0),
    groups=1,
    transposed=False,
    bias=True,
    dtype=torch.float32,
    needs_dx=True,
)
TRANSPOSED = replace(
    PLAIN,
    weight=(6, 4, 3, 3, 3),
    stride=(2, 2, 2),
    output_padding=(1, 1, 1),
    transposed=True,
)
BLOCKS = {
    "plain": PLAIN,
    "deep": replace(PLAIN, x=(1, 6, 35, 4, 6)),
    "deep, strided": replace(PLAIN, x=(1, 6, 70, 4, 6), stride=(2, 1, 3), bias=False),
    "dilated": replace(PLAIN, x=(1, 6, 41, 7, 8), dilation=(2, 2, 2), padding=(2, 2, 2)),
    "in groups": replace(PLAIN, weight=(8, 3, 3, 3, 3), groups=2),
    "kernel larger": replace(PLAIN, x=(1, 6, 2, 2, 2)),
    "kernel of 7": replace(
        PLAIN, x=(1, 1, 33, 9, 8), weight=(4, 1, 7, 7, 7), padding=(3, 3, 3), bias=False
    ),
    "transposed": TRANSPOSED,
    "transposed, without bias": replace(TRANSPOSED, bias=False),
}


def whole(result: Any, which: str, block: BlockConvolution) -> list[torch.Tensor]:
    """One tensor or two (of weight and bias) of what a kernel returns."""
    tiles = result if isinstance(result, list) else [result]
    if which == "forward":
        return [torch.cat(tiles, dim=2)]
    if which == "input gradient":
        return [torch.cat([t[0] if isinstance(t, tuple) else t for t in tiles], dim=2)]
    if block.transposed and isinstance(tiles[0][0], tuple):  # as a convolution, and the bias apart
        return [tiles[0][0][1], tiles[0][1]]
    return [sum(parts) for parts in list(zip(*tiles, strict=True))[1 : 3 if block.bias else 2]]


def expected(block: BlockConvolution, which: str, given: Any) -> list[torch.Tensor]:
    """By torch's autograd in float64."""
    x, weight, g = (t.double() for t in given.tensors)
    x.requires_grad_()
    weight.requires_grad_()
    bias = given.bias.double().requires_grad_() if block.bias else None
    common = (block.stride, block.padding)
    if block.transposed:
        y = F.conv_transpose3d(
            x, weight, bias, *common, block.output_padding, block.groups, block.dilation
        )
    else:
        y = F.conv3d(x, weight, bias, *common, block.dilation, block.groups)
    if which == "forward":
        return [y.detach()]
    wanted = [x] if which == "input gradient" else [weight] + ([bias] if block.bias else [])
    return list(torch.autograd.grad(y, wanted, g))


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_kernel_does_the_pass(name: str, which: str) -> None:
    torch.manual_seed(0)
    block = BLOCKS[name]
    given = operands(block)
    truth = expected(block, which, given)
    found = dict(kernels(block, which, given))
    assert {"torch c", "torch cl"} < set(found)
    assert any("/4" in kernel for kernel in found) == (
        block.result()[2] >= 16
        and (which != "input gradient" or (block.stride[0] == 1 and block.dilation[0] == 1))
        and not block.transposed
    )
    for kernel, run in found.items():
        parts = whole(run(), which, block)
        assert len(parts) == len(truth), kernel
        for part, right in zip(parts, truth, strict=True):
            assert part.shape == right.shape, kernel
            assert (part - right).norm() <= 1e-5 * right.norm(), kernel


class Functional(nn.Module):
    """Convolutions by module and by function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding="same")
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3, 3))
        self.up = nn.ConvTranspose3d(4, 2, 2, stride=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.conv3d(self.first(x), self.weight, stride=2, padding=1)
        return self.up(F.avg_pool3d(F.conv3d(y, weight=self.weight, padding=1), (1, 2, 2)))


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("name", ["plain", "deep", "kernel of 7"])
def test_the_library_s_own_kernels_do_the_pass(name: str, which: str) -> None:
    torch.manual_seed(0)
    block = replace(BLOCKS[name], dtype=torch.bfloat16)
    given = operands(block)
    found = dict(own_kernels(block, which, given))
    assert ("hyperslab cl" in found) == direct_is_known(), "not on every processor"
    check_own(found, block, which, given)


@pytest.mark.parametrize("name", ["plain", "deep", "kernel of 7", "dilated", "deep, strided"])
def test_the_weight_s_gradient_as_one_product(name: str) -> None:
    torch.manual_seed(0)
    block = replace(BLOCKS[name], dtype=torch.bfloat16)
    given = operands(block)
    found = dict(own_kernels(block, "weight gradient", given))
    assert "hyperslab im2col cl" in found
    check_own(found, block, "weight gradient", given)


def check_own(found: Any, block: BlockConvolution, which: str, given: Operands) -> None:
    for kernel, run in found.items():
        assert is_own(kernel)
        result = run()
        parts = [result] if which != "weight gradient" else list(result)[: 1 + block.bias]
        for part, right in zip(parts, expected(block, which, given), strict=True):
            assert (part.double() - right).norm() <= 1e-2 * right.norm(), kernel


@pytest.mark.parametrize("name", ["dilated", "in groups", "transposed", "deep, strided"])
def test_not_every_pass_has_a_kernel_of_the_library_s_own(name: str) -> None:
    block = replace(BLOCKS[name], dtype=torch.bfloat16)
    assert not list(own_kernels(block, "forward", operands(block)))


def blocks_of(depth: int, axes: dict[str, int]) -> list[LayerConvolution]:
    """Of one rank, whose sample is so deep."""
    model = Functional()
    x = torch.randn(1, 1, depth, 8, 8)
    if axes:
        grid = hs.Grid(**axes)
        hs.parallelize(model, grid)
        x = hs.shard(x, grid)

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(x)

    return noted(model, forward)


def test_the_convolutions_of_a_serial_step_are_found() -> None:
    found = blocks_of(8, {})
    assert [layer.name for layer in found] == ["first", "", "", "up"]
    assert [layer.block.x for layer in found] == [
        (1, 1, 8, 8, 8),
        (1, 4, 8, 8, 8),
        (1, 4, 4, 4, 4),
        (1, 4, 4, 2, 2),
    ]
    assert [layer.block.padding[0] for layer in found] == [1, 1, 1, 0]
    assert [layer.block.stride[0] for layer in found] == [1, 2, 1, 2]
    assert [layer.block.needs_dx for layer in found] == [False, True, True, True]
    assert [layer.block.bias for layer in found] == [True, False, False, False]
    assert [layer.block.transposed for layer in found] == [False, False, False, True]
    assert {layer.block.dtype for layer in found} == {torch.bfloat16}


def test_a_rank_works_on_its_block_and_on_all_of_what_is_gathered() -> None:
    for found in run_ranks(2, blocks_of, 16, {"depth": 2}):
        assert [layer.block.x[2] for layer in found] == [8, 8, 4, 4]
        assert [layer.block.x[3] for layer in found] == [8, 8, 4, 2]
        assert [layer.block.needs_dx for layer in found] == [False, True, True, True]
    for found in run_ranks(2, blocks_of, 2, {"depth": 2}):  # a plane each is too thin
        assert [layer.block.x[2] for layer in found] == [2, 2, 1, 1]


def test_a_padding_is_found_only_where_there_is_one() -> None:
    block = replace(PLAIN, x=(1, 6, 7, 7, 7), weight=(8, 6, 4, 3, 3))
    assert block.with_result((8, 7, 5)).padding == (2, 1, 0)
    given = {"input": torch.empty(1, 6, 7, 7, 7), "weight": torch.empty(8, 6, 4, 3, 3)}
    y = torch.empty(1, 8, 7, 7, 7)
    with pytest.raises(ValueError, match="no plain convolution"):
        block_of(given, y, transposed=False)


def test_the_fastest_kernel_counts() -> None:
    turns = [{"a": 3.0, "b": 2.0}, {"a": 1.0, "b": 2.5}, {"a": 4.0, "b": 2.25}]
    assert fastest_of(turns) == {"kernel": "a", "min": 1.0, "median": 2.25}
    layers = [LayerConvolution(name, PLAIN) for name in ("one", "two")]
    turn = {(PLAIN, which): {"a": 2.0, "b": 1.0 + i} for i, which in enumerate(PASSES)}
    assert limit_of(layers, turn) == 2 * (1.0 + 2.0 + 2.0)
    turn[PLAIN, "forward"]["hyperslab cl"] = 0.5
    assert limit_of(layers, turn) == 2 * (1.0 + 2.0 + 2.0)
    assert limit_of(layers, turn, own=True) == 2 * (0.5 + 2.0 + 2.0)


def test_a_grid_is_read() -> None:
    assert extents_of("depth=2,height=3") == {"depth": 2, "height": 3}


@pytest.mark.long
def test_a_step_is_compared_with_its_limit() -> None:
    found = run_ranks(2, measure, "cosmoflow", 32, {"depth": 2}, torch.float32, 2)[0]
    names = [row["layer"] for row in found["layers"]]
    assert names[:2] == ["features.conv1", "features.conv2"]
    assert list(found["layers"][0]["passes"]) == list(PASSES[:2])
    assert list(found["layers"][1]["passes"]) == list(PASSES)
    step = found["step"]["parts"]["step"]["distributed"]
    for kind, multiple in found["multiple"].items():
        passes = [one for row in found["layers"] for one in row["passes"].values()]
        assert multiple == pytest.approx(step[kind] / sum(one[kind] for one in passes))
    assert all(row["in the step"] > 0 for row in found["layers"])
