"""Weight gradients by Winograd's filtering: compiled and reference (tier: no process; compiles)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.kernels import conv_in_c
from hyperslab.kernels.compile import Library, winograd_is_known
from tests.kernels.compiled import BOTH_WIDTHS, library_of

ROUNDING = {torch.float32: 0.0, torch.bfloat16: torch.finfo(torch.bfloat16).eps}
"""Of a result that is written in this type, where sums are in float32."""

needs_kernels = pytest.mark.skipif(
    not winograd_is_known(), reason="no compiler, or no vectors: the reference runs"
)


@pytest.fixture(scope="module", params=BOTH_WIDTHS)
def functions(request: pytest.FixtureRequest) -> Iterator[Library | None]:
    with library_of(request.param, "winograd_gradient") as functions:
        yield functions


@dataclass(frozen=True)
class Case:
    """Extents of both parities, channels around the vectors' 8 and 16, padding beyond a window."""

    samples: int
    channels: int
    out: int
    extents: tuple[int, int, int]
    padding: tuple[int, int, int]
    dtype: torch.dtype
    seed: int

    def volumes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x and g, each amid NaN: what lies beside a volume is none of its voxels."""
        generator = torch.Generator().manual_seed(self.seed)
        results = [e + 2 * p - 2 for e, p in zip(self.extents, self.padding, strict=True)]
        found = []
        for channels, extents in ((self.channels, self.extents), (self.out, results)):
            shape = (self.samples, *extents, channels)
            size = torch.Size(shape).numel()
            room = torch.full((size + 200,), torch.nan, dtype=self.dtype)
            voxels = room[100 : 100 + size].view(shape)
            voxels.copy_(torch.randn(shape, generator=generator))
            found.append(voxels.movedim(-1, 1))
        return found[0], found[1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    padding = tuple(draw(st.sampled_from([0, 0, 1, 1, 2, 4])) for _ in range(3))
    least = [max(1, 3 - 2 * p) for p in padding]
    depth, height, width = (low + draw(st.integers(0, 9)) for low in least)
    width += draw(st.sampled_from([0, 0, 31, 64, 130]))
    return Case(
        samples=draw(st.integers(1, 3)),
        channels=draw(st.sampled_from([1, 3, 7, 8, 9, 16, 17, 24, 40])),
        out=draw(st.sampled_from([1, 2, 8, 9, 15, 16, 17, 33])),
        extents=(depth, height, width),
        padding=padding,  # type: ignore[arg-type]
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 999)),
    )


@needs_kernels
@settings(deadline=None, max_examples=150)
@given(case=cases(), with_bias=st.booleans())
def test_the_gradients_are_the_reference(functions: Library, case: Case, with_bias: bool) -> None:
    x, g = case.volumes()
    found = torch.ops.hyperslab.winograd_gradient(x, g, case.padding, with_bias)
    expected = conv_in_c.winograd_gradient(x.double(), g.double(), case.padding, with_bias)
    sizes = conv_in_c.winograd_gradient(x.double().abs(), g.double().abs(), case.padding, with_bias)
    # A kernel's 27 numbers are made of the same products: it is their size that rounding is of.
    bounds = sizes[0].amax((2, 3, 4), keepdim=True), sizes[1]
    for got, want, bound in zip(found, expected, bounds, strict=True):
        assert got.dtype == case.dtype
        assert got.shape == want.shape
        allowed = ROUNDING[case.dtype] * want.abs() + 4e-6 * bound + 1e-30
        assert ((got.double() - want).abs() <= allowed).all()


@needs_kernels
def test_no_infinity_is_lost(functions: Library) -> None:
    case = Case(1, 9, 17, (7, 6, 11), (1, 1, 1), torch.float32, 0)
    for value in (torch.inf, -torch.inf, torch.nan):
        for which, channel in ((0, 4), (1, 8)):
            volumes = case.volumes()
            volumes[which][0, channel, 3, 2, 5] = value
            dw, db = torch.ops.hyperslab.winograd_gradient(*volumes, case.padding, True)
            wrong, of_bias = conv_in_c.winograd_gradient(*volumes, case.padding, True)
            assert torch.equal(dw.isfinite(), wrong.isfinite())
            assert torch.equal(db.isfinite(), of_bias.isfinite())


@needs_kernels
@pytest.mark.parametrize("extents", [(64, 256, 512), (1, 1, 20_000), (1, 64, 4096)])
def test_sums_of_many_voxels_keep_their_digits(
    functions: Library, extents: tuple[int, int, int]
) -> None:
    """More tiles than are summed at a time, each bringing the same, so that errors add up."""
    x = torch.full((1, 1, *(e + 2 for e in extents)), 1 / 3)
    g = torch.full((1, 1, *extents), 1 / 3)
    dw, db = torch.ops.hyperslab.winograd_gradient(x, g, (0, 0, 0), True)
    third = g.flatten()[0].double()
    torch.testing.assert_close(
        dw.double(), (third**2 * g.numel()).expand(dw.shape), rtol=5e-6, atol=0
    )
    torch.testing.assert_close(db.double(), (third * g.numel()).expand(1), rtol=5e-6, atol=0)


def test_threads_share_the_planes() -> None:
    case = Case(2, 8, 16, (17, 24, 48), (1, 1, 1), torch.float32, 3)
    x, g = case.volumes()
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(torch.ops.hyperslab.winograd_gradient(x, g, case.padding, True))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-2)


def test_other_memory_formats_and_types() -> None:
    case = Case(1, 9, 8, (4, 5, 6), (1, 0, 1), torch.float32, 1)
    x, g = case.volumes()
    expected = torch.ops.hyperslab.winograd_gradient(x, g, case.padding, True)
    found = torch.ops.hyperslab.winograd_gradient(
        x.contiguous(), g.contiguous(), case.padding, True
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    wide = torch.ops.hyperslab.winograd_gradient(x.double(), g.double(), case.padding, True)
    assert wide[0].dtype == torch.float64
    torch.testing.assert_close(wide[0].float(), expected[0], rtol=1e-4, atol=1e-4)


def test_a_gradient_of_another_shape_is_refused() -> None:
    x, g = Case(1, 8, 8, (4, 5, 6), (1, 1, 1), torch.float32, 0).volumes()
    with pytest.raises(ValueError, match="a gradient"):
        torch.ops.hyperslab.winograd_gradient(x, g[:, :, 1:], (1, 1, 1), True)
    with pytest.raises(ValueError, match="a gradient in"):
        torch.ops.hyperslab.winograd_gradient(x, g.bfloat16(), (1, 1, 1), True)


@pytest.mark.parametrize("with_bias", [True, False])
def test_forms_are_known_without_data(with_bias: bool) -> None:
    x, g = Case(1, 4, 8, (3, 4, 5), (0, 1, 1), torch.bfloat16, 0).volumes()
    found = torch.ops.hyperslab.winograd_gradient(x, g, (0, 1, 1), with_bias)
    forms = torch.ops.hyperslab.winograd_gradient(x.to("meta"), g.to("meta"), (0, 1, 1), with_bias)
    for y, form in zip(found, forms, strict=True):
        assert (form.shape, form.stride(), form.dtype) == (y.shape, y.stride(), y.dtype)
