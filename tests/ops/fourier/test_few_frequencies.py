"""Transforms of cut dims of which few frequencies are used (tier: a few gloo ranks)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.ops.indexing import DeferredWrites
from hyperslab.ops.spectra import Arc, Spectrum
from hyperslab.ops.views import Span
from hyperslab.tensor.sharded import ForwardScope, Policy
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"indexing": {"zeros_like"}}

BACK = {"fftn": "ifftn", "ifftn": "fftn", "rfftn": "irfftn", "ihfftn": "hfft"}


@contextmanager
def in_a_module(x: Any) -> Iterator[Any]:
    """The tensor as a parallelised module has it, where results may wait that take messages."""
    scope = ForwardScope()
    with scope.running():
        cut = isinstance(x, hs.Sharded)
        yield hs.Sharded.from_local(x.local, x.partition, x.grid, Policy(scope=scope)) if cut else x


def filtered(
    x: Any,
    *,
    kind: str,
    dims: tuple[int, ...],
    norm: str | None,
    turned: tuple[int, ...],
    boxes: list[tuple[slice, ...]],
    like: bool,
    lengths: tuple[int, ...] | None,
    seed: int,
) -> Any:
    """A Fourier layer: some boxes of the frequencies are used, everything else is zero."""
    with in_a_module(recut(x, seed)) as inside:
        if kind in ("fftn", "ifftn"):
            inside = torch.view_as_complex(torch.stack([inside, inside.flip(1)], -1))
        if kind == "ihfftn":  # torch's hfftn of several dims wants the whole line
            dims = dims[-1:]
            modes = torch.fft.ihfft(inside, dim=dims[0], norm=norm)
        else:
            modes = getattr(torch.fft, kind)(inside, dim=dims, norm=norm)
        modes = torch.fft.fftshift(modes, dim=turned) if turned else modes
        # Values that are not cut stay ordinary, and cut ones cannot follow with a gradient.
        first: Any = modes[boxes[0]]
        like = like or (isinstance(first, hs.Sharded) and not first.partition.axes)
        out = torch.zeros_like(modes) if like else torch.zeros(modes.shape, dtype=modes.dtype)
        for number, box in enumerate(boxes):
            out[box] = modes[box] * (1 + number * 2j)
        out = torch.fft.ifftshift(out, dim=turned) if turned else out
        if kind == "ihfftn":
            n = lengths[0] if lengths else x.shape[dims[0]]
            return torch.fft.hfft(out, n=n, dim=dims[0], norm=norm)
        s = lengths or tuple(x.shape[d] for d in dims)
        y = getattr(torch.fft, BACK[kind])(out, s=s[: len(dims)], dim=dims, norm=norm)
        return torch.view_as_real(y) * 1 if y.is_complex() else y


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    """Boxes that lie apart, overlap or wrap around when the zero frequency is shifted."""
    n = draw(st.sampled_from([2, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(max(p, 3), p + 5)) for p in parts_of(grid, n)]
    shape = (draw(st.integers(grid["data"], grid["data"] + 1)), 3, *extents)
    last = n + 1
    several = [(2, 3), (3, 2), (1, last), (2, last)] + [(2, 3, 4), (4, 2, 3)] * (n == 3)
    dims = draw(st.sampled_from(several))
    kind = draw(st.sampled_from(sorted(BACK)))
    along = list(shape)
    if kind in ("rfftn", "ihfftn"):
        along[dims[-1]] = along[dims[-1]] // 2 + 1
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        box = []
        for extent in along:
            lo = draw(st.integers(0, extent - 1))
            box.append(slice(lo, draw(st.integers(lo + 1, extent))))
        if draw(st.booleans()):
            box[0] = slice(None)
        boxes.append(tuple(box))
    lengths = tuple(draw(st.integers(2, 9)) for _ in dims) if draw(st.booleans()) else None
    options = {
        "kind": kind,
        "dims": dims,
        "norm": draw(st.sampled_from([None, "ortho", "forward"])),
        "turned": draw(st.sampled_from([(), dims[:-1], (0, *dims[:-1])])),
        "boxes": boxes,
        "like": draw(st.booleans()),
        "lengths": lengths,
        "seed": draw(st.integers(0, 9)),
    }
    return Example(
        grid=grid, shape=shape, options=options, dtype=draw(dtypes), seed=draw(st.integers(0, 99))
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_boxes(ranks: int) -> None:
    run_ranks(ranks, compare, filtered, draw_examples(examples(ranks), 28))


@pytest.mark.parametrize(
    ("spans", "extent", "arc"),
    [
        ([(0, 3), (5, 3)], 8, Arc(5, 6)),
        ([(2, 3), (3, 1)], 8, Arc(2, 3)),
        ([(0, 8)], 8, Arc(0, 8)),
        ([(1, 2), (5, 1)], 8, Arc(1, 5)),
        ([(1, 2), (6, 1)], 8, Arc(6, 5)),
    ],
)
def test_arcs(spans: list[tuple[int, int]], extent: int, arc: Arc) -> None:
    found = Arc.around([Span(*span) for span in spans], extent)
    assert found == arc
    line = torch.arange(extent) + 1
    few = found.taken(line, 0)
    whole = torch.zeros_like(line)
    back = found.put_back(few, 0, extent)
    whole[: len(back)] = back
    for start, count in spans:
        assert torch.equal(whole[start : start + count], line[start : start + count])
    assert int((whole != 0).sum()) == arc.count


def pending(x: Any) -> Any:
    return x.pending


def waiting() -> None:
    """A look at what is known of a spectrum does not have it computed; at its values it does."""
    full = torch.randn(1, 2, 6, 4, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.fft.rfftn(full, dim=(2, 3, 4))
    with in_a_module(hs.shard(full, hs.Grid(depth=2))) as x:
        modes = torch.fft.rfftn(x, dim=(2, 3, 4))
        out: Any = torch.zeros(modes.shape, dtype=modes.dtype, device=modes.device)
        assert modes.is_complex()
        assert isinstance(pending(modes), Spectrum)
        out[:, :, :2] = modes[:, :, :2]
        out[:, :, 4:] = modes[:, :, 4:]
        assert isinstance(pending(out), DeferredWrites)
        assert isinstance(pending(modes), Spectrum)
        out[0, 1, 3] = 5
        assert pending(out) is None
        out[:, :, 3] = 5j
    want = torch.zeros_like(expected)
    want[:, :, :2] = expected[:, :, :2]
    want[:, :, 4:] = expected[:, :, 4:]
    want[:, :, 3] = 5j
    assert torch.allclose(out.full(), want)
    assert torch.allclose(modes.full(), expected)


def test_what_is_known_before() -> None:
    run_ranks(2, waiting)


class Filter(torch.nn.Module):
    """Keeps few frequencies, in a checkpoint that is given all of them."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.before = torch.nn.Conv3d(2, 2, 3, padding=1)
        self.weight = torch.nn.Parameter(torch.rand(2, 1, 1, 1) + 0.5)

    def kept(self, modes: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(modes.shape, dtype=modes.dtype, device=modes.device)
        out[:, :, 2:5, 1:4, :2] = modes[:, :, 2:5, 1:4, :2] * self.weight
        turned = torch.fft.ifftshift(out, dim=(2, 3))
        return torch.fft.irfftn(turned, s=(7, 6, 4), dim=(2, 3, 4)) * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfftn(self.before(x), dim=(2, 3, 4))
        modes = torch.fft.fftshift(modes, dim=(2, 3))
        if self.reentrant is None:
            return self.kept(modes)
        return checkpoint(self.kept, modes, use_reentrant=self.reentrant)


def checkpointed(reentrant: bool | None) -> None:
    torch.manual_seed(0)
    serial = Filter(reentrant).double()
    net = copy.deepcopy(serial)
    full = torch.randn(1, 2, 7, 6, 4, dtype=torch.float64)
    y = serial(full)
    y.square().sum().backward()
    grid = hs.Grid(depth=2)
    hs.parallelize(net, grid)
    got = net(hs.shard(full, grid))
    got.square().sum().backward()
    assert torch.allclose(got.full(), y)
    for a, b in zip(net.parameters(), serial.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-10)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_checkpoint_of_a_spectrum(reentrant: bool | None) -> None:
    run_ranks(2, checkpointed, reentrant)


def changed(case: str) -> None:
    full = torch.randn(1, 2, 6, 4, 4, dtype=torch.float64)
    with in_a_module(hs.shard(full, hs.Grid(depth=2))) as x:
        modes = torch.fft.rfftn(x, dim=(2, 3, 4))
        low = modes[:, :, :2]
        expected = torch.fft.rfftn(full, dim=(2, 3, 4))
        expected[:, :, :2] *= 2
        if case == "whole":
            modes *= 2
            low + 1
        elif case == "part":
            low *= 2
            assert torch.allclose(low.full(), expected[:, :, :2])
        else:
            twice = low * 2
            del low
            modes[:, :, :2] = twice
        assert torch.allclose(modes.full(), expected)


def test_a_change_of_all_that_serial_torch_would_show_in_a_part_is_refused() -> None:
    with pytest.raises(hs.LayoutError, match="a copy where serial torch has a view"):
        run_ranks(2, changed, "whole")


@pytest.mark.parametrize("case", ["part", "after"])
def test_a_spectrum_is_changed_by_its_parts(case: str) -> None:
    run_ranks(2, changed, case)


def no_graph() -> None:
    full = torch.randn(1, 2, 6, 4, 4, dtype=torch.float64, requires_grad=True)
    with in_a_module(hs.shard(full, hs.Grid(depth=2))) as x:
        modes = torch.fft.rfftn(x, dim=(2, 3, 4))
        with torch.no_grad():
            low = modes[:, :, :2]
        assert not low.requires_grad
        with torch.no_grad():
            shape = modes.real.shape  # looked at under no_grad, with its graph
        assert tuple(shape) == (1, 2, 6, 4, 3)
        assert modes.requires_grad


def test_graphs_are_those_of_when_it_was_called() -> None:
    run_ranks(2, no_graph)


def zeros() -> None:
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.ones(2, 3, 5, 4, 7), grid)
    for options in ({}, {"dtype": torch.float64}, {"dtype": torch.complex64}):
        found = torch.zeros_like(x, **options)
        assert found.partition == x.partition
        assert torch.equal(found.full(), torch.zeros(x.shape, **options))
    with in_a_module(x) as inside:
        found = torch.zeros_like(torch.complex(inside, inside))
    assert torch.equal(found.full(), torch.zeros(x.shape, dtype=torch.complex64))


def test_zeros_are_cut_as_the_other() -> None:
    run_ranks(2, zeros)
