"""Mean and variance of a block against the plain reference (tier: no process)."""

from __future__ import annotations

import pytest
import torch

from hyperslab.kernels import moments, registry

SHAPES = [(2, 3), (1, 1, 5), (3, 4, 2, 5), (1, 40, 24, 24, 24), (2, 6, 3, 4, 5, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_version_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 2).to(dtype)
    mean, var = moments.reference(x)
    for version in (moments.local_moments, moments._cached, moments._torch):
        got_mean, got_var = version(x)
        assert got_mean.dtype == got_var.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(got_mean.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got_var.double(), var, rtol=1e-5, atol=1e-6)


def test_slices_larger_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "CACHED", 7)
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    for got, want in zip(moments._cached(x), moments.reference(x), strict=True):
        torch.testing.assert_close(got, want)


def test_which_version_runs() -> None:
    assert registry.choose("moments", torch.empty(1, 2)) == "cached"
    assert registry.choose("moments", torch.empty(1, 2, device="meta")) == "torch"
