"""Gradients of convolutions of every channel by itself (tier: no process; compiles)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.kernels.compile import Library, depthwise_is_known
from hyperslab.kernels.conv import dispatch
from hyperslab.kernels.conv_problem import ConvOptions, Problem, in_channels_last, problem_for
from hyperslab.kernels.registry import conv_variant, onednn_supports
from tests.kernels.compiled import BOTH_WIDTHS, library_of
from tests.kernels.conv.reference import conv_reference

needs_kernels = pytest.mark.skipif(
    not depthwise_is_known(), reason="no compiler, or no vectors: the reference runs"
)


@pytest.fixture(scope="module", params=BOTH_WIDTHS)
def functions(request: pytest.FixtureRequest) -> Iterator[Library | None]:
    with library_of(request.param, "depthwise_gradient") as functions:
        yield functions


@dataclass(frozen=True)
class Case:
    """Channels around the vectors' 8 and 16, kernels around the 8 taps that are summed abreast."""

    samples: int
    channels: int
    extents: tuple[int, ...]
    kernel: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: torch.dtype

    @property
    def problem(self) -> Problem:
        return problem_for(
            "weight",
            (self.samples, self.channels, *self.extents),
            (self.channels, 1, *self.kernel),
            self.dtype,
            ConvOptions((1,) * len(self.kernel), self.padding, self.dilation, self.channels),
        )

    def volume(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        """Amid NaN: what lies beside a volume is none of its voxels."""
        n, channels, *extents = shape
        room = torch.full((torch.Size(shape).numel() + 200,), torch.nan, dtype=self.dtype)
        voxels = room[100:-100].view(n, *extents, channels)
        voxels.copy_(torch.randn(voxels.shape, generator=torch.Generator().manual_seed(seed)))
        return voxels.movedim(-1, 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kernel = tuple(draw(st.sampled_from([1, 2, 3, 5, 7, 8, 9, 17])) for _ in range(3))
    padding = tuple(draw(st.sampled_from([0, k // 2, k // 2, k + 1])) for k in kernel)
    dilation = draw(st.sampled_from([(1, 1, 1), (1, 1, 1), (2, 1, 3)]))
    steps = zip(kernel, padding, dilation, strict=True)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in steps]
    extents = [low + draw(st.integers(0, 6)) for low in least]
    extents[2] += draw(st.sampled_from([0, 0, 0, 520]))
    if torch.Size(kernel).numel() > 400:
        extents = least
    return Case(
        samples=draw(st.integers(1, 2)),
        channels=draw(st.sampled_from([1, 3, 8, 9, 16, 17, 40])),
        extents=tuple(extents),
        kernel=kernel,
        padding=padding,
        dilation=dilation,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )


def expected(case: Case, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The weight's gradient by its definition, in float64, tap by tap.

    Torch's own, or autograd through the reference, takes ten times as long for large kernels.
    """
    around = [p for padding in reversed(case.padding) for p in (padding, padding)]
    padded, g = F.pad(x.double(), around), g.double()
    result = torch.empty(case.problem.weight, dtype=torch.float64)
    for tap in itertools.product(*map(range, case.kernel)):
        steps = zip(tap, case.dilation, g.shape[2:], strict=True)
        read = tuple(slice(step * at, step * at + extent) for at, step, extent in steps)
        result[:, 0][:, *tap] = (padded[:, :, *read] * g).sum((0, 2, 3, 4))
    return result


@needs_kernels
@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_the_gradient_is_the_reference(functions: Library, case: Case) -> None:
    x = case.volume(case.problem.x, 0)
    g = case.volume(case.problem.y, 1)
    dw = expected(case, x, g)
    sizes = expected(case, x.abs(), g.abs())
    found = torch.ops.hyperslab.depthwise_gradient(x, g, case.kernel, case.padding, case.dilation)
    assert (found.dtype, found.shape) == (case.dtype, dw.shape)
    assert found.is_contiguous()
    rounding = torch.finfo(torch.bfloat16).eps if case.dtype == torch.bfloat16 else 0.0
    assert ((found.double() - dw).abs() <= rounding * dw.abs() + 3e-6 * sizes + 1e-30).all()


@needs_kernels
def test_the_kernel_itself_runs(functions: Library) -> None:
    """Where it does not, torch's gradient would take its place unnoticed."""
    case = Case(1, 5, (4, 4, 4), (3, 3, 3), (1, 1, 1), (1, 1, 1), torch.float32)
    x, g = case.volume(case.problem.x, 0), case.volume(case.problem.y, 1)
    with patch("hyperslab.kernels.conv_in_c.aten_gradients", side_effect=AssertionError):
        torch.ops.hyperslab.depthwise_gradient(x, g, case.kernel, case.padding, case.dilation)


@needs_kernels
def test_threads_share_the_channels() -> None:
    case = Case(2, 70, (5, 17, 24), (3, 3, 3), (1, 1, 1), (1, 1, 1), torch.float32)
    x, g = case.volume(case.problem.x, 0), case.volume(case.problem.y, 1)
    operands = (x, g, case.kernel, case.padding, case.dilation)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(torch.ops.hyperslab.depthwise_gradient(*operands))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@needs_kernels
def test_sums_of_many_voxels_keep_their_digits(functions: Library) -> None:
    """Each voxel brings the same, so that errors add up."""
    for extents in ((32, 128, 128), (1, 1, 200_000)):
        x = torch.full((1, 1, *extents), 1 / 3)
        dw = torch.ops.hyperslab.depthwise_gradient(x, x, (1, 1, 1), (0, 0, 0), (1, 1, 1))
        third = x.flatten()[0].double()
        assert dw.item() == pytest.approx((third**2 * x.numel()).item(), rel=5e-6)


def test_operands_that_do_not_fit_are_torchs_to_refuse() -> None:
    x = torch.randn(1, 4, 5, 5, 5)
    with pytest.raises(RuntimeError):
        torch.ops.hyperslab.depthwise_gradient(x, x[:, :, 1:], (3, 3, 3), (1, 1, 1), (1, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extents", [(8, 9, 8), (2, 2, 2), (1, 3, 9)])
def test_both_passes_are_chosen_and_right(dtype: torch.dtype, extents: tuple[int, ...]) -> None:
    """Blocks with and without their halo, smaller than the kernel, too."""
    if not onednn_supports(dtype):
        pytest.skip("oneDNN does not convolve in this type here")
    torch.manual_seed(0)
    for padding in ((3, 3, 3), (0, 3, 3)):
        depth = extents[0] + (6 if padding[0] == 0 else 0)
        case = Case(1, 9, (depth, *extents[1:]), (7, 7, 7), padding, (1, 1, 1), dtype)
        problem = case.problem
        x = in_channels_last(torch.randn(problem.x).to(dtype))
        weight = torch.randn(problem.weight).to(dtype)
        g = in_channels_last(torch.randn(problem.y).to(dtype))
        if depthwise_is_known():
            assert conv_variant(problem) == "depthwise"
            assert conv_variant(problem.of("input")) in ("flipped", "float32")
        dw, _ = dispatch(problem, x, g, weight, False)
        dx = dispatch(problem.of("input"), g, weight, None)
        leaf = x.double().requires_grad_()
        y = conv_reference(leaf, weight.double(), None, problem.options)
        (wanted,) = torch.autograd.grad(y, leaf, g.double())
        for got, want in ((dx, wanted), (dw, expected(case, x, g))):
            assert got.dtype == dtype
            error = (got.double() - want).norm() / want.norm()
            assert error < (4e-3 if dtype == torch.bfloat16 else 1e-6)
