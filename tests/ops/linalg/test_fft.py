"""Fourier transforms of cut tensors (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "linalg": {
        "fft", "ifft", "rfft", "irfft", "hfft", "ihfft",
        "fft2", "ifft2", "rfft2", "irfft2", "hfft2", "ihfft2",
        "fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn",
        "fftshift", "ifftshift", "view_as_real", "view_as_complex", "real", "imag", "conj",
        "resolve_conj", "__get__",  # of real and imag
    }
}  # fmt: skip
KINDS = [name for name in COVERS["linalg"] if "fft" in name]


def transform(x: Any, *, kind: str, options: dict[str, Any], seed: int) -> Any:
    """Of a complex tensor, or a real one where the transform wants that; seen as real."""
    x = recut(x, seed)
    if not kind.startswith(("r", "ih")):
        x = torch.view_as_complex(torch.stack([x, x.flip(1)], -1))
    y = getattr(torch.fft, kind)(x, **options)
    return torch.view_as_real(y.resolve_conj()) * 1 if y.is_complex() else y


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    """Along the last dims, which are not cut, with other extents and norms."""
    n = draw(st.sampled_from([1, 2, 3]))
    grid = draw(grids(ranks).filter(lambda g: parts_of(g, n)[-1] == 1))
    extents = [draw(st.integers(p, p + 3)) for p in parts_of(grid, n)]
    extents[-1] += 1
    kind = draw(st.sampled_from(sorted(KINDS)))
    options: dict[str, Any] = {}
    if kind.endswith("shift"):
        options["dim"] = draw(st.sampled_from([1, -1, (1, -1)]))
    else:
        several = kind[-1] in "2n"
        dims = draw(st.sampled_from([(-1,), (1, -1), (-1, 1)])) if kind[-1] == "n" else (1, -1)
        options["dim"] = dims if several else -1
        if draw(st.booleans()):
            lengths = tuple(draw(st.integers(2, 6)) for _ in dims)
            options |= {"s": lengths} if several else {"n": lengths[0]}
        options["norm"] = draw(st.sampled_from([None, "ortho", "forward"]))
    return Example(
        grid=grid,
        shape=(draw(st.integers(grid["data"], grid["data"] + 1)), 3, *extents),
        options={"kind": kind, "options": options, "seed": draw(st.integers(0, 9))},
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_transform(ranks: int) -> None:
    run_ranks(ranks, compare, transform, draw_examples(examples(ranks), 28))


def parts(x: Any) -> Any:
    y = torch.fft.fft(x, dim=1)
    y = y * y.conj() + torch.conj(y) * (1 + 2j)
    return y.real * 2 + y.imag + torch.real(y) - torch.imag(y) + torch.real(x)


def test_real_and_imaginary_parts() -> None:
    run_ranks(4, compare, parts, [Example({"depth": 2, "width": 2}, (2, 3, 5, 4, 3))])


def all_dims() -> None:
    """Without ``dim`` the last ones, or all; nothing is cut."""
    full = torch.randn(2, 3, 4)
    x = hs.gather(hs.shard(full, hs.Grid(width=2)), "width")
    assert torch.equal(torch.fft.fftn(x).full(), torch.fft.fftn(full))
    assert torch.equal(torch.fft.fftn(x, s=(2, 5)).full(), torch.fft.fftn(full, s=(2, 5)))
    assert torch.equal(torch.fft.fft2(x).full(), torch.fft.fft2(full))
    assert torch.equal(torch.fft.fftshift(x).full(), torch.fft.fftshift(full))


def test_all_dims() -> None:
    run_ranks(2, all_dims)


def refused(case: str) -> None:
    x = hs.shard(torch.randn(2, 3, 4, 6), hs.Grid(width=2))
    calls = {
        "last": lambda: torch.fft.fft(x),
        "some": lambda: torch.fft.rfft2(x),
        "all": lambda: torch.fft.fftn(x),
        "shift": lambda: torch.fft.fftshift(x),
        "complex": lambda: torch.view_as_complex(x),
        "out": lambda: torch.fft.fft(x, dim=1, out=x),
    }
    calls[case]()


@pytest.mark.parametrize("case", ["last", "some", "all", "shift", "complex"])
def test_cut_dims_are_refused(case: str) -> None:
    with pytest.raises(
        hs.LayoutError, match=r"(?s)needs all of dim .*gather\(x, \('width',\)\)"
    ) as e:
        run_ranks(2, refused, case)
    assert "until=" in str(e.value)


def test_out_is_refused() -> None:
    with pytest.raises(hs.LayoutError, match=r"fft_fft\(out=...\) has no rule"):
        run_ranks(2, refused, "out")


def test_one_dim_of_several() -> None:
    """The transforms of several dims take a single one, too."""
    full = torch.randn(2, 3, 4, 5)
    x = hs.shard(full, hs.Grid())
    for dim in (1, -1, (1,), [-2, 3]):
        assert torch.allclose(torch.fft.fftn(x, dim=dim).full(), torch.fft.fftn(full, dim=dim))
    assert torch.allclose(torch.fft.fftshift(x, 1).full(), torch.fft.fftshift(full, 1))
