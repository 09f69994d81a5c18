"""Passes that oneDNN computes wrong, or crashes in, equal the reference (tier: no process).

Each shape was found by random ones with freed memory full of NaN: plain torch fails with it on some
processor. The reference is torch in float64, which is none of oneDNN's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hyperslab.kernels import conv, conv_variants, registry
from hyperslab.kernels.conv import dispatch
from hyperslab.kernels.conv_problem import (
    ConvOptions,
    Problem,
    Task,
    aten_convolution,
    in_channels_last,
    problem_for,
)
from hyperslab.kernels.registry import conv_variant, force
from tests.selection import by_rotation

HALF, FLOAT = torch.bfloat16, torch.float32


def problem_of(
    task: Task,
    dtype: torch.dtype,
    x: tuple[int, ...],
    filters: int,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Problem:
    steps = (dilation,) * len(kernel) if isinstance(dilation, int) else dilation
    options = ConvOptions(stride, padding, steps, groups)
    return problem_for(task, x, (filters, x[1] // groups, *kernel), dtype, options)


def leave_nan() -> None:
    """Fills the memory that is allocated next."""
    freed = [torch.full((size,), torch.nan) for size in (10**3, 10**4, 10**5, 10**6, 10**7)]
    del freed


def check(problem: Problem) -> None:
    torch.manual_seed(0)
    dtype = problem.dtype
    x = torch.randn(problem.x).to(dtype).double().requires_grad_()
    weight = torch.randn(problem.weight).to(dtype).double().requires_grad_()
    y = aten_convolution(x, weight, None, problem.options)
    g = torch.randn_like(y).to(dtype)
    dx, dw = torch.autograd.grad(y, (x, weight), g.double())
    bias = torch.randn(problem.x[1]).to(dtype)  # of a transposed convolution
    volume, gradient = in_channels_last(x.detach().to(dtype)), in_channels_last(g)
    narrow = weight.detach().to(dtype)
    with_bias = dx + bias.double().view(-1, *[1] * (x.dim() - 2))
    leave_nan()
    pairs = {
        "forward": lambda: [(dispatch(problem, volume, narrow, None), y.detach())],
        "input": lambda: [
            (dispatch(problem, gradient, narrow, None), dx),
            (dispatch(problem, gradient, narrow, bias), with_bias),
        ],
        "weight": lambda: [(dispatch(problem, volume, gradient, narrow, False)[0], dw)],
    }
    for found, expected in pairs[problem.task]():
        most = expected.abs().max()
        bound = 2e-2 if dtype == HALF else 1e-4
        torch.testing.assert_close(found.double() / most, expected / most, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("x", "kernel", "stride"),
    [
        ((1, 1, 24, 32, 34), (1, 3, 7), (2, 2, 1)),
        ((1, 1, 24, 32, 34), (3, 1, 7), (1, 2, 1)),
        ((3, 1, 192, 64), (1, 3), (2, 1)),
    ],
)
def test_windows_of_one_channel_that_leave_out_lines(
    x: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    padding = tuple((k - 1) // 2 for k in kernel)
    problem = problem_of("forward", FLOAT, x, 4, kernel, stride, padding)
    assert problem.skips_lines
    check(problem)


@pytest.mark.parametrize("x", [(1, 24, 192, 4), (1, 17, 4, 34, 3)])
def test_one_output_in_the_last_dim_of_many_channels(x: tuple[int, ...]) -> None:
    dims = len(x) - 2
    problem = problem_of("forward", HALF, x, 4, (2,) * dims, (3,) * dims, (0,) * dims)
    assert problem.has_lone_column
    check(problem)


@pytest.mark.parametrize(
    ("x", "kernel", "stride", "padding", "groups"),
    [
        ((1, 4, 16, 16, 32), (16, 16, 16), (16, 16, 16), (0, 0, 0), 1),
        ((2, 16, 8, 4, 8), (4, 4, 4), (4, 4, 4), (0, 0, 0), 1),
        ((1, 8, 4, 5, 7), (2, 2, 8), (1, 1, 1), (1, 0, 4), 1),
        ((1, 24, 3, 11), (2, 8), (1, 1), (0, 0), 2),
        ((1, 12, 28, 118), (8, 1), (1, 1), (0, 0), 1),
    ],
)
def test_taps_of_a_row_that_fill_tiles_of_registers(
    x: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    groups: int,
) -> None:
    """As a patch of 16 voxels of four channels does, that vision transformers begin with."""
    problem = problem_of("forward", HALF, x, 8, kernel, stride, padding, groups=groups)
    assert problem.fills_tiles
    check(problem)


@pytest.mark.parametrize("kernel", [(1, 16), (15, 15), (1, 2, 33)])
def test_long_rows_of_channels_by_themselves(kernel: tuple[int, ...]) -> None:
    """OneDNN's forward pass never ends; neither does torch's, of a volume channels last."""
    ones = (1,) * len(kernel)
    x = (1, 3, *kernel[:-1], kernel[-1] + 40)
    zeros = (0,) * len(kernel)
    check(problem_of("forward", HALF, x, 3, kernel, ones, zeros, groups=3))
    more = tuple(k - 1 for k in kernel)
    problem = problem_of("input", HALF, x, 3, kernel, ones, more, groups=3)
    assert not conv_variants.can_flip(problem)
    check(problem)


def test_columns_that_fill_tiles_are_refused() -> None:
    problem = problem_of("forward", HALF, (1, 1, 88, 129), 8, (16, 12), (1, 1), (0, 1))
    assert not conv_variants.has_columns(problem)
    check(problem)


def test_a_flipped_kernel_whose_rows_fill_tiles_is_refused() -> None:
    problem = problem_of("input", HALF, (1, 3, 9, 9, 12), 8, (3, 3, 8), (1, 1, 1), (1, 1, 4))
    assert not conv_variants.can_flip(problem)
    check(problem)


def test_a_flipped_kernel_whose_taps_step_over_the_volume_is_refused() -> None:
    for dtype in (HALF, FLOAT):  # the window at -1 has taps at -1 and 2, of two planes
        x = (1, 3, 5, 9, 12)
        problem = problem_of("input", dtype, x, 8, (2, 3, 3), (1, 1, 1), (0, 1, 1), (3, 1, 1))
        assert not conv_variants.can_flip(problem)
        check(problem)


@pytest.mark.parametrize(
    ("x", "filters", "kernel", "stride", "padding", "dilation", "gaps"),
    [
        ((2, 32, 7, 21, 4), 2, (1, 5, 2), (3, 2, 2), (0, 0, 0), 1, (0,)),
        ((2, 2, 23, 59, 6), 31, (2, 1, 3), (4, 2, 1), (0, 1, 1), (1, 1, 3), (0, 1)),
        ((2, 24, 23, 31, 7), 8, (2, 1, 3), (4, 1, 1), (1, 0, 0), (2, 1, 2), (0,)),
        ((2, 24, 46, 35), 32, (1, 2), (3, 1), (0, 2), (1, 2), (0,)),
        ((2, 24, 45, 35), 32, (2, 2), (3, 1), (1, 2), (1, 2), (0,)),
    ],
)
def test_windows_that_leave_out_planes_or_rows(
    x: tuple[int, ...],
    filters: int,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: int | tuple[int, ...],
    gaps: tuple[int, ...],
) -> None:
    problem = problem_of("forward", HALF, x, filters, kernel, stride, padding, dilation)
    assert problem.gaps == gaps
    check(problem)


def test_voxels_some_way_apart_of_few_channels() -> None:
    problem = problem_of("weight", FLOAT, (2, 12, 96, 96), 48, (1, 1), (2, 2), (0, 0))
    assert problem.skips_voxels
    check(problem)


@pytest.mark.parametrize("padding", [(0, 1, 1), (1, 3, 1)])
def test_planes_that_no_window_reads(padding: tuple[int, ...]) -> None:
    x = (1, 64, 8 if padding[0] == 0 else 9, 32, 34)
    problem = problem_of("input", HALF, x, 16, (3, 3, 3), (4, 3, 1), padding)
    assert problem.planes_beyond or problem.outreaches
    check(problem)


@pytest.mark.parametrize(("channels", "dilation"), [(16, 3), (32, 2)])
def test_channels_by_themselves_in_two_dims(channels: int, dilation: int) -> None:
    x = (1, channels, 34, 64)
    problem = problem_of("weight", HALF, x, channels, (3, 3), (1, 1), (1, 1), dilation, channels)
    assert conv_variant(problem) == "widened"
    check(problem)


@pytest.mark.parametrize(
    ("x", "kernel", "stride", "dilation"),
    [
        ((3, 4, 40, 27, 26), (1, 7, 9), (2, 1, 1), (1, 3, 1)),
        ((3, 8, 25, 37, 30), (3, 9, 9), (2, 1, 2), (1, 2, 1)),
    ],
)
def test_channels_by_themselves_in_three_dims(
    x: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> None:
    problem = problem_of("weight", HALF, x, x[1], kernel, stride, (0, 0, 8), dilation, x[1])
    assert conv_variant(problem) == "widened"
    check(problem)


@pytest.mark.parametrize(
    ("x", "filters", "kernel", "stride", "padding"),
    [
        ((3, 48, 69, 3), 12, (14, 2), (1, 4), (0, 1)),
        ((1, 1, 197, 1), 3, (2, 1), (3, 4), (0, 0)),
        ((3, 48, 5, 69, 3), 12, (3, 3, 2), (1, 1, 4), (0, 0, 0)),
    ],
)
def test_the_weight_of_one_output_in_the_last_dim(
    x: tuple[int, ...],
    filters: int,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> None:
    problem = problem_of("weight", HALF, x, filters, kernel, stride, padding)
    assert problem.makes_lone_column
    check(problem)


def test_windows_whose_taps_step_over_the_volume() -> None:
    x = (2, 24, 2, 6, 8)
    problem = problem_of("forward", HALF, x, 48, (2, 2, 3), (1, 4, 3), (3, 1, 2), (3, 3, 1))
    assert problem.outreaches  # the third window's planes are -1 and 2, of two
    check(problem)
    more = problem_of("forward", FLOAT, (1, 1, 3, 9), 1, (2, 3), (1, 1), (1, 1), (2, 1))
    assert not more.outreaches  # each window reads a row of three


@pytest.mark.parametrize(
    ("x", "filters", "kernel", "padding"), [((3, 33, 3), 48, 3, 2), ((3, 48, 2), 24, 2, 1)]
)
def test_one_dim_goes_round_faults_of_two(
    x: tuple[int, ...], filters: int, kernel: int, padding: int
) -> None:
    torch.manual_seed(0)
    options = ConvOptions((4,), (padding,), (1,), 1)
    volume = torch.randn(x).to(HALF)
    weight = torch.randn(filters, x[1], kernel).to(HALF)
    wide = [t.double().requires_grad_() for t in (volume, weight)]
    expected = aten_convolution(*wide, None, options)
    g = torch.randn_like(expected).to(HALF)
    leave_nan()
    y = conv.conv_forward(volume, weight, None, options)
    assert y.is_contiguous()
    torch.testing.assert_close(y.double(), expected.detach(), rtol=2e-2, atol=0.3)
    leave_nan()
    found = conv.conv_backward(g, volume, weight, options, [True, True, False])
    gradients = torch.autograd.grad(expected, wide, g.double())
    for one, right in zip(found, gradients, strict=False):
        assert one is not None
        torch.testing.assert_close(one.double(), right, rtol=2e-2, atol=0.3)


OVERRUNS = [
    problem_of("weight", HALF, (1, 32, 6, 80, 66), 32, (3, 3, 3), (2, 2, 2), (0, 1, 1)),
    problem_of("weight", HALF, (2, 16, 6, 96, 96), 16, (5, 5, 5), (1, 1, 1), (0, 2, 0)),
    problem_of("weight", HALF, (1, 4, 5, 130, 96), 16, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
]


@pytest.mark.parametrize(("problem", "variant"), by_rotation(OVERRUNS, ["turned", "widened"]))
def test_rows_that_outgrow_the_cache_over_few_planes(problem: Problem, variant: str) -> None:
    assert problem.overruns_tiles
    with force({"conv weight": variant}):
        assert conv_variant(problem) == variant
        check(problem)


@pytest.mark.skipif(not registry.onednn_supports(HALF), reason="no AVX-512 here")
@pytest.mark.parametrize("problem", OVERRUNS)
def test_the_rule_goes_round_it_where_there_are_tiles(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tiles in (True, False):
        for module in (conv_variants, registry):
            monkeypatch.setattr(module, "processor_has_matrix_tiles", lambda tiles=tiles: tiles)
        assert (registry.choose("conv weight", problem) == "turned") == tiles


def test_depth_and_height_change_places_only_where_that_helps() -> None:
    thick = replace(OVERRUNS[0], x=(1, 32, 64, 64, 64))
    assert not thick.overruns_tiles
    for problem in (thick, *OVERRUNS):
        turned = registry.CONV_VARIANTS["weight"]["turned"]
        assert turned.legal(problem) == problem.overruns_tiles
        assert problem.turned.turned == problem


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize(
    ("extents", "kernel", "stride", "padding"),
    [
        ((4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
        ((2, 6, 3), (7, 6, 4), (2, 2, 2), (6, 3, 2)),  # kernels as large as the volume, or larger
        ((4, 6, 5), (6, 5, 7), (1, 1, 1), (2, 2, 3)),
    ],
)
def test_gradients_with_a_graph_are_no_kernels_for_tiles(
    extents: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    tiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are torch's own, whose kernels for AMX damage memory: in float32 there."""
    monkeypatch.setattr(conv, "processor_has_matrix_tiles", lambda: tiles)
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, *extents).bfloat16(), torch.randn(3, 2, *kernel).bfloat16()]
    x, weight = (leaf.requires_grad_() for leaf in leaves)
    problem = problem_of("weight", HALF, (1, 2, *extents), 3, kernel, stride, padding)
    g = torch.randn(problem.y).bfloat16().requires_grad_()
    needs = (True, True, True)
    own = conv.aten_backward(g, x, weight, problem.options, needs)
    assert all(one is not None and one.dtype == HALF and one.requires_grad for one in own)
    wide = [one.detach().double().requires_grad_() for one in (g, x, weight)]
    expected = conv.aten_backward(*wide, problem.options, needs)
    for of_all, one in ((own, expected), (second(own, g, x, weight), second(expected, *wide))):
        for got, want in zip(of_all, one, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=0.3)


def second(gradients: conv.Gradients, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Differentiates the sum of all gradients."""
    total = sum(one.float().sum() for one in gradients if one is not None)
    return torch.autograd.grad(total, leaves)
