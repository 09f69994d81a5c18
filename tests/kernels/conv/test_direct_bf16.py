"""Direct convolution: compiled and reference (tier: no process)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.kernels import conv_in_c
from hyperslab.kernels.compile import direct_is_known
from hyperslab.kernels.memory_format import CHANNELS_LAST

EPS = torch.finfo(torch.bfloat16).eps

needs_kernels = pytest.mark.skipif(
    not direct_is_known(),
    reason="no compiler, or no products of bfloat16: the references run",
)


@dataclass(frozen=True)
class Case:
    """A convolution in steps of one; results of every width around the vectors' 16 and 32."""

    samples: int
    channels: int
    out: int
    extents: tuple[int, ...]
    kernel: tuple[int, ...]
    padding: tuple[int, ...]
    seed: int

    def _random(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(*shape, generator=generator).bfloat16()

    def volume(self, channels: int, extents: tuple[int, ...]) -> torch.Tensor:
        x = self._random(self.samples, channels, *extents)
        return x.contiguous(memory_format=CHANNELS_LAST[x.dim()])

    @property
    def x(self) -> torch.Tensor:
        return self.volume(self.channels, self.extents)

    @property
    def g(self) -> torch.Tensor:
        """The result's gradient."""
        steps = zip(self.extents, self.kernel, self.padding, strict=True)
        return self.volume(self.out, tuple(e + 2 * p - k + 1 for e, k, p in steps))

    def weight(self, adjoint: bool) -> torch.Tensor:
        first, second = (self.channels, self.out) if adjoint else (self.out, self.channels)
        return self._random(first, second, *self.kernel)

    @property
    def bias(self) -> torch.Tensor:
        return self._random(self.out)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = draw(st.sampled_from([3, 3, 2]))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(dims))
    least = [max(1, k - 2 * p) for k, p in zip(kernel, padding, strict=True)]
    widths = st.sampled_from([0, 1, 5, 14, 15, 16, 17, 30, 31, 33, 64, 70])
    last = least.pop() + draw(widths)
    return Case(
        samples=draw(st.integers(1, 2)),
        channels=draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17])),
        out=draw(st.sampled_from([1, 2, 3, 4, 8, 9, 16, 24])),
        extents=(*(low + draw(st.integers(0, 5)) for low in least), last),
        kernel=kernel,
        padding=padding,
        seed=draw(st.integers(0, 999)),
    )


def magnitude(case: Case, weight: torch.Tensor, adjoint: bool) -> torch.Tensor:
    """The same sums of absolute values: what rounding is measured by."""
    return conv_in_c.direct_convolution(
        case.x.double().abs(), weight.double().abs(), None, case.padding, adjoint
    )


@needs_kernels
@settings(deadline=None, max_examples=200)
@given(case=cases(), adjoint=st.booleans(), with_bias=st.booleans())
def test_a_convolution_is_the_reference(case: Case, adjoint: bool, with_bias: bool) -> None:
    weight = case.weight(adjoint)
    bias = case.bias if with_bias else None
    given_ = (case.padding, adjoint)
    y = torch.ops.hyperslab.direct_convolution(case.x, weight, bias, *given_)
    wide = bias if bias is None else bias.double()
    expected = conv_in_c.direct_convolution(case.x.double(), weight.double(), wide, *given_)
    allowed = EPS * expected.abs() + 1e-5 * magnitude(case, weight, adjoint) + 1e-30
    assert ((y.double() - expected).abs() <= allowed).all()
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous(memory_format=CHANNELS_LAST[y.dim()])


@needs_kernels
@settings(deadline=None, max_examples=200)
@given(case=cases(), with_bias=st.booleans())
def test_the_gradients_of_weight_and_bias_are_the_reference(case: Case, with_bias: bool) -> None:
    given_ = (case.kernel, case.padding, with_bias)
    found = torch.ops.hyperslab.direct_convolution_gradient(case.x, case.g, *given_)
    x, g = case.x.double(), case.g.double()
    expected = conv_in_c.direct_convolution_gradient(x, g, *given_)
    sizes = conv_in_c.direct_convolution_gradient(x.abs(), g.abs(), *given_)
    for got, want, size in zip(found, expected, sizes, strict=True):
        assert got.dtype == torch.bfloat16
        assert got.shape == want.shape
        assert ((got.double() - want).abs() <= EPS * want.abs() + 1e-5 * size + 1e-30).all()


@needs_kernels
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_gradients_have_nothing_to_do_with_torchs_default_type(default: torch.dtype) -> None:
    """In which the sums would be made: by the direct kernel, Winograd's and a depthwise one."""
    x = torch.linspace(-1, 1, 4 * 8 * 6**3).bfloat16().view(4, 8, 6, 6, 6)
    ones = (1, 1, 1)
    ops = torch.ops.hyperslab

    def gradients() -> list[torch.Tensor]:
        return [
            *ops.direct_convolution_gradient(x, x, (3, 3, 3), ones, True),
            *ops.winograd_gradient(x.float(), x.float(), ones, True),
            ops.depthwise_gradient(x.float(), x.float(), (3, 3, 3), ones, ones),
        ]

    expected = gradients()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = gradients()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_kernels
def test_nothing_but_windows_that_read_it_see_an_infinity() -> None:
    case = Case(1, 8, 8, (4, 5, 37), (3, 3, 3), (1, 1, 1), 0)
    x = case.x
    x[0, 3, 2, 2, 20] = torch.inf
    y = torch.ops.hyperslab.direct_convolution(x, case.weight(False), None, case.padding, False)
    reached = torch.zeros(y.shape, dtype=torch.bool)
    reached[:, :, 1:4, 1:4, 19:22] = True
    assert torch.equal(~y.isfinite(), reached)


@needs_kernels
def test_large_results_go_past_the_caches() -> None:
    case = Case(1, 2, 16, (9, 64, 1024), (1, 1, 3), (0, 0, 1), 1)
    y = torch.ops.hyperslab.direct_convolution(
        case.x, case.weight(False), None, case.padding, False
    )
    assert y.numel() * y.itemsize >= 16 << 20
    expected = conv_in_c.direct_convolution(case.x, case.weight(False), None, case.padding, False)
    torch.testing.assert_close(y, expected, rtol=2 * EPS, atol=1e-5)


@needs_kernels
def test_sums_of_many_voxels_keep_their_digits() -> None:
    x = torch.ones(1, 1, 33, 512, 1024, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    dw, db = torch.ops.hyperslab.direct_convolution_gradient(x, x, [1, 1, 1], [0, 0, 0], True)
    assert dw.item() == db.item() == torch.tensor(float(x.numel())).bfloat16().item()


def test_threads_share_the_planes() -> None:
    case = Case(2, 8, 8, (16, 24, 48), (3, 3, 3), (0, 1, 1), 3)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            y = torch.ops.hyperslab.direct_convolution(
                case.x, case.weight(False), case.bias, case.padding, False
            )
            dw, db = torch.ops.hyperslab.direct_convolution_gradient(
                case.x, case.g, case.kernel, case.padding, True
            )
            found.append((y, dw.float(), db.float()))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=2 * EPS, atol=0.05)


def test_what_is_refused() -> None:
    case = Case(1, 4, 8, (3, 4, 5), (1, 1, 1), (0, 0, 0), 0)
    with pytest.raises(ValueError, match="a weight"):
        torch.ops.hyperslab.direct_convolution(case.x, case.weight(True), None, case.padding, False)
    with pytest.raises(ValueError, match="a bias"):
        torch.ops.hyperslab.direct_convolution(
            case.x, case.weight(False), case.bias[1:], case.padding, False
        )
    with pytest.raises(ValueError, match="a gradient"):
        torch.ops.hyperslab.direct_convolution_gradient(
            case.x, case.g[:, :, 1:], case.kernel, case.padding, True
        )


def test_forms_are_known_without_data() -> None:
    case = Case(1, 4, 8, (3, 4, 5), (2, 3, 3), (0, 1, 1), 0)
    run = (torch.ops.hyperslab.direct_convolution, torch.ops.hyperslab.direct_convolution_gradient)
    for adjoint in (False, True):
        weight = case.weight(adjoint)
        y = run[0](case.x, weight, None, case.padding, adjoint)
        form = run[0](case.x.to("meta"), weight.to("meta"), None, case.padding, adjoint)
        assert (form.shape, form.stride(), form.dtype) == (y.shape, y.stride(), y.dtype)
    given_ = (case.kernel, case.padding, True)
    found = run[1](case.x, case.g, *given_)
    forms = run[1](case.x.to("meta"), case.g.to("meta"), *given_)
    for y, form in zip(found, forms, strict=True):
        assert (form.shape, form.stride(), form.dtype) == (y.shape, y.stride(), y.dtype)
