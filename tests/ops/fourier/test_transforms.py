"""Fourier transforms of cut tensors (tier: a few gloo ranks)."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.tensor import sharded
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "fourier": {
        "fft", "ifft", "rfft", "irfft", "hfft", "ihfft",
        "fft2", "ifft2", "rfft2", "irfft2", "hfft2", "ihfft2",
        "fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn",
        "fftshift", "ifftshift", "view_as_real", "view_as_complex", "real", "imag", "conj",
        "resolve_conj", "__get__",  # of real and imag
    }
}  # fmt: skip
KINDS = [name for name in COVERS["fourier"] if "fft" in name]


def transform(x: Any, *, kind: str, options: dict[str, Any], seed: int) -> Any:
    """Of a complex tensor, or a real one where the transform wants that; seen as real."""
    x = recut(x, seed)
    if not kind.startswith(("r", "ih")):
        x = torch.view_as_complex(torch.stack([x, x.flip(1)], -1))
    y = getattr(torch.fft, kind)(x, **options)
    return torch.view_as_real(y.resolve_conj()) * 1 if y.is_complex() else y


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    """Along any dims, cut or not, with other extents and norms."""
    n = draw(st.sampled_from([1, 2, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(p, p + 3)) for p in parts_of(grid, n)]
    extents[-1] += 1
    kind = draw(st.sampled_from(sorted(KINDS)))
    options: dict[str, Any] = {}
    if kind.endswith("shift"):
        options["dim"] = draw(st.sampled_from([1, -1, (1, -1), (0, 2), None]))
    else:
        several = kind[-1] in "2n"
        choices = [(-1,), (1, -1), (-1, 1), (2,), (0, -1), (-1, 0, 2)][: 5 if n == 1 else 6]
        dims = draw(st.sampled_from(choices)) if kind[-1] == "n" else (1, -1)
        options["dim"] = dims if several else draw(st.sampled_from([-1, 2, 0]))
        along = options["dim"][-1] if several else options["dim"]
        one = kind.startswith(("ir", "h")) and [grid["data"], 3, *extents][along] == 1
        if one or draw(st.booleans()):  # of one element it would be none
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
        "complex": lambda: torch.view_as_complex(x),
        "out": lambda: torch.fft.fft(x, dim=1, out=x),
    }
    calls[case]()


def test_pairs_that_are_cut_are_no_complex_numbers() -> None:
    with pytest.raises(
        hs.LayoutError, match=r"(?s)needs all of dim .*gather\(x, \('width',\)\)"
    ) as e:
        run_ranks(2, refused, "complex")
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


def odd_arguments() -> None:
    """Torch's own errors, also where dims are cut."""
    full = torch.randn(2, 3, 4, 6)
    x = hs.shard(full, hs.Grid(width=2))
    for options in ({"dim": (3, 3)}, {"dim": (2, 3), "s": (1,)}, {"dim": (3,), "s": (0,)}):
        with pytest.raises(RuntimeError):
            torch.fft.fftn(full, **options)
        with pytest.raises(RuntimeError):
            torch.fft.fftn(x, **options)


def test_what_torch_refuses() -> None:
    run_ranks(2, odd_arguments)


def memory() -> list[int]:
    """How many elements this rank holds in each pencil, and afterwards."""
    grid = hs.Grid(depth=2, height=2)
    x = hs.shard(torch.randn(1, 4, 8, 8, 8), grid)
    found = []
    wrap = sharded._wrap

    def noting(local: torch.Tensor, *rest: Any) -> Any:
        found.append(local.numel())
        return wrap(local, *rest)

    with patch.object(sharded, "_wrap", noting):
        y = torch.fft.rfftn(x, dim=(2, 3, 4))
    assert y.partition.axes == ("depth", "height")
    return found


def test_no_rank_holds_more_than_its_share() -> None:
    """Of 2048 real numbers, then 4 x 8 x 8 x 5 complex ones, a quarter each."""
    for sizes in run_ranks(4, memory):
        assert max(sizes) <= 4 * 8 * 8 * 8 // 4


def no_home() -> list[str]:
    log = logging.getLogger("hyperslab")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    full = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    x = hs.shard(full, hs.Grid(data=2, height=2, width=2))
    y = torch.fft.fft2(x)
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)
    assert torch.allclose(y.full(), torch.fft.fft2(full))
    assert y.partition == x.partition
    return lines


def test_an_axis_without_a_home_is_gathered_and_said() -> None:
    lines = run_ranks(8, no_home)[0]
    assert any("no other dim can be cut along height" in line for line in lines)
