"""Sparse linear maps along all dims: compiled and reference (tier: no process)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.kernels import compile as library
from hyperslab.kernels import resample
from hyperslab.kernels.memory_format import CHANNELS_LAST, memory_format_of
from hyperslab.kernels.resample import SparseMap

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Case:
    """A block, and maps along its dims from random entries; some results have none."""

    shape: tuple[int, ...]
    results: tuple[int, ...]
    dtype: torch.dtype
    result: torch.dtype
    channels_last: bool
    seed: int

    def block(self, shape: tuple[int, ...], *, special: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(*shape, generator=generator)
        kind = torch.randint(0, 40, shape, generator=generator)
        for number, value in enumerate([torch.inf, -torch.inf, torch.nan] if special else ()):
            x = torch.where(kind == number, value, x)
        order = CHANNELS_LAST[x.dim()] if self.channels_last else torch.contiguous_format
        return x.to(self.dtype).contiguous(memory_format=order)

    def maps(self) -> list[SparseMap]:
        generator = torch.Generator().manual_seed(self.seed)
        maps = []
        for extent, results in zip(self.shape[2:], self.results, strict=True):
            counts = torch.randint(0, 4, (results,), generator=generator)
            total = int(counts.sum())
            source = torch.randint(0, extent, (total,), generator=generator)
            weight = torch.randint(-4, 5, (total,), generator=generator) / 4  # some are zero
            begin = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            maps.append(SparseMap(begin, source, weight, extent))
        return maps


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = draw(st.sampled_from([3, 3, 2, 1]))
    channels = draw(st.sampled_from([1, 2, 4, 8, 16, 17, 32]))
    return Case(
        shape=(draw(st.integers(1, 2)), channels, *(draw(st.integers(1, 7)) for _ in range(dims))),
        results=tuple(draw(st.integers(1, 9)) for _ in range(dims)),
        dtype=draw(st.sampled_from(DTYPES)),
        result=draw(st.sampled_from(DTYPES)),
        channels_last=dims > 1 and channels > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


def tensors(maps: list[SparseMap]) -> list[torch.Tensor]:
    return [tensor for one in maps for tensor in one.tensors]


@pytest.mark.skipif(library.library() is None, reason="no compiler: the references run")
@settings(deadline=None, max_examples=150)
@given(case=cases(), special=st.booleans())
def test_compiled_is_the_reference(case: Case, special: bool) -> None:
    x = case.block(case.shape, special=special)
    given_ = (tensors(case.maps()), case.results)
    y = torch.ops.hyperslab.resample(x, *given_, case.result)
    expected = resample.resample(x.double(), *given_, torch.float64)
    eps = torch.finfo(case.result).eps
    assert torch.equal(y.isnan(), expected.isnan())
    torch.testing.assert_close(y.double(), expected, rtol=2 * eps, atol=1e-5, equal_nan=True)
    assert y.dtype == case.result
    assert y.is_contiguous(memory_format=memory_format_of(x))


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_the_adjoint_is_one(case: Case) -> None:
    """<F x, y> = <x, F' y>."""
    maps = case.maps()
    back = [one.adjoint() for one in maps]
    x = torch.randn(*case.shape, dtype=torch.float64)
    y = torch.randn(*case.shape[:2], *case.results, dtype=torch.float64)
    run = torch.ops.hyperslab.resample
    there = (run(x, tensors(maps), case.results, x.dtype) * y).sum()
    home = (run(y, tensors(back), case.shape[2:], y.dtype) * x).sum()
    torch.testing.assert_close(there, home)


def test_threads_share_the_rows() -> None:
    case = Case((2, 8, 20, 24, 24), (40, 48, 47), torch.float32, torch.float32, True, 3)
    x = case.block(case.shape, special=False)
    given_ = (tensors(case.maps()), case.results, torch.float32)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(torch.ops.hyperslab.resample(x, *given_))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_what_is_refused() -> None:
    case = Case((1, 2, 3, 4, 5), (3, 4, 5), torch.float32, torch.float32, False, 0)
    x = case.block(case.shape, special=False)
    with pytest.raises(ValueError, match="maps with"):
        torch.ops.hyperslab.resample(x, tensors(case.maps())[:6], case.results, x.dtype)
    with pytest.raises(ValueError, match="maps with"):
        torch.ops.hyperslab.resample(x, tensors(case.maps()), (3, 4, 6), x.dtype)


def test_a_form_is_known_without_data() -> None:
    case = Case((1, 4, 3, 4, 5), (6, 8, 9), torch.bfloat16, torch.float32, True, 0)
    x = case.block(case.shape, special=False)
    given_ = (case.results, torch.float32)
    y = torch.ops.hyperslab.resample(x, tensors(case.maps()), *given_)
    meta = [tensor.to("meta") for tensor in tensors(case.maps())]
    form = torch.ops.hyperslab.resample(x.to("meta"), meta, *given_)
    assert (form.shape, form.stride(), form.dtype) == (y.shape, y.stride(), y.dtype)
