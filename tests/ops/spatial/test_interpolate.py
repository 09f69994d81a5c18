"""Interpolation equals the serial one (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.kernels.memory_format import CHANNELS_LAST
from hyperslab.ops.spatial import BlockKind, Resize, lay_out_interpolate
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"spatial": {"interpolate"}}

MODES = {
    1: ["nearest", "nearest-exact", "linear", "area"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic", "area"],
    3: ["nearest", "nearest-exact", "trilinear", "area"],
}


def resize(x: Any, **options: Any) -> Any:
    return F.interpolate(x, **options)


def twice(x: Any, **options: Any) -> Any:
    """A gradient that is differentiated once more."""
    y = F.interpolate(x, **options)
    (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    return gradient


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    """Every mode, up and down, by size and by factor, to fewer outputs than ranks and to many."""
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    mode = draw(st.sampled_from(MODES[n]))
    options: dict[str, Any] = {"mode": mode}
    if mode.endswith(("linear", "cubic")):
        options["align_corners"] = draw(st.booleans())
        if n == 2 and draw(st.booleans()):
            options |= {"antialias": True, "align_corners": False}
    extents = [draw(st.integers(parts, parts + 8)) for parts in parts_of(grid, n)]
    least = 2 if options.get("antialias") else 1  # see test_what_is_refused
    how = draw(st.sampled_from(["size", "factor", "recomputed", "double"]))
    if how == "size":
        options["size"] = [draw(st.integers(least, 24)) for _ in range(n)]
    elif how == "double":
        options["scale_factor"] = 2
    else:
        factors = [
            draw(st.sampled_from([2.0, 3.0, 0.5, 1.5, 1.0, 2.3, 0.4, 1.1])) for _ in range(n)
        ]
        sizes = [int(e * f) for e, f in zip(extents, factors, strict=True)]
        odd = [s == e and f != 1 for s, e, f in zip(sizes, extents, factors, strict=True)]
        factors = [
            2.0 if s < least or (o and how == "factor") else f
            for s, f, o in zip(sizes, factors, odd, strict=True)
        ]
        options["scale_factor"] = tuple(factors)
        options["recompute_scale_factor"] = True if how == "recomputed" else None
    return Example(
        grid=grid,
        shape=(draw(st.integers(1, 3)), draw(st.integers(1, 5)), *extents),
        options=options,
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_interpolation(ranks: int) -> None:
    run_ranks(ranks, compare, resize, draw_examples(examples(ranks), 28))


@pytest.mark.parametrize("ranks", [1, 4])
def test_second_derivatives(ranks: int) -> None:
    run_ranks(ranks, compare, twice, draw_examples(examples(ranks), 15))


def test_sampling_follows_the_whole_extent() -> None:
    """Extents at which torch's rounding shows: the block's own coordinates would differ."""
    cases = [
        Example(grid={"width": 3}, shape=(1, 2, n), options={"size": size, "mode": mode})
        for n, size in [(7, 49), (41, 67), (29, 87), (53, 79), (49, 7), (100, 33), (11, 121)]
        for mode in ("nearest", "nearest-exact", "linear", "area")
    ]
    run_ranks(3, compare, resize, cases)


def where_torch_disagrees_with_itself() -> list[Example]:
    """In float64 a few extents whose gradient torch sends elsewhere than it copied from."""
    found = []
    for n in range(3, 40):
        for size in range(3, 80):
            x = torch.arange(n, dtype=torch.float64).view(1, 1, n).requires_grad_()
            y = F.interpolate(x, size=size)
            y.sum().backward()
            if x.grad is None or not torch.equal(
                torch.bincount(y[0, 0].long(), minlength=n), x.grad[0, 0].long()
            ):
                found.append(Example(grid={"width": 3}, shape=(1, 2, n), options={"size": size}))
    return found


def test_nearest_gradients_go_where_torch_sends_them() -> None:
    cases = where_torch_disagrees_with_itself()
    assert cases
    run_ranks(3, compare, resize, cases)


def doubled(mode: str, align: bool | None) -> tuple[tuple[int, ...], bool]:
    """How the doubled map is cut, and whether channels are still last in memory."""
    grid = hs.Grid(depth=2)
    x = torch.randn(1, 4, 6, 4, 4).to(memory_format=torch.channels_last_3d)
    y = F.interpolate(hs.shard(x, grid), scale_factor=2, mode=mode, align_corners=align)
    cut = y.partition.cuts[2]
    assert cut is not None
    return cut.bounds, y.local.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize(
    ("mode", "align"), [("nearest", None), ("trilinear", False), ("trilinear", True)]
)
def test_a_doubled_map_is_cut_as_the_one_that_was_halved(mode: str, align: bool | None) -> None:
    assert run_ranks(2, doubled, mode, align) == [((0, 6, 12), True)] * 2


def labels(dtype: torch.dtype) -> bool:
    x = torch.randint(0, 200, (2, 3, 7, 5, 6)).to(dtype)
    y = F.interpolate(hs.shard(x, hs.Grid(depth=3)), size=(5, 11, 7), mode="nearest-exact")
    z = F.interpolate(x, size=(5, 11, 7), mode="nearest-exact")
    return y.dtype == dtype and torch.equal(y.full(), z)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16])
def test_other_types_are_copied(dtype: torch.dtype) -> None:
    assert run_ranks(3, labels, dtype) == [True] * 3


def bytes_between(size: int) -> list[bool]:
    """Torch computes in a fixed point, and cubic weights go beyond both ends of the type."""
    x = torch.randint(0, 256, (2, 3, 8, 9), dtype=torch.uint8)
    options: list[dict[str, Any]] = [
        {"mode": mode, "align_corners": align}
        for mode in ("bilinear", "bicubic")
        for align in (False, True)
    ]
    cut = hs.shard(x, hs.Grid(height=2))
    return [
        torch.equal(F.interpolate(cut, size, **one).full(), F.interpolate(x, size, **one))
        for one in options
    ]


@pytest.mark.parametrize("size", [5, 13])
def test_images_of_bytes(size: int) -> None:
    assert run_ranks(2, bytes_between, size) == [[True] * 4] * 2


def half_precision(autocast: bool) -> float:
    x = torch.randn(2, 3, 7, 5, 6, dtype=torch.bfloat16)
    options: dict[str, Any] = {"scale_factor": 2, "mode": "trilinear", "align_corners": True}
    with torch.no_grad(), torch.autocast("cpu", enabled=autocast):
        y = F.interpolate(hs.shard(x, hs.Grid(depth=3)), **options)
        assert y.dtype == F.interpolate(x, **options).dtype
    exact = F.interpolate(x.double(), **options)
    return float((y.full() - exact).norm() / exact.norm())


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_rounded_once(autocast: bool) -> None:
    assert max(run_ranks(3, half_precision, autocast)) < 2e-3


def unusual_numbers(dtype: torch.dtype, n: int, last: bool, options: dict[str, Any]) -> list[bool]:
    """Whether NaN and infinities of result and gradient are where serial torch has them."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(2, 4, *[7, 5, 6][:n], generator=generator)
    y = F.interpolate(x, **options)
    blocks = []
    for block in (x, torch.randn(y.shape, generator=generator)):
        kind = torch.randint(0, 150, block.shape, generator=generator)
        for number, value in enumerate([torch.inf, -torch.inf, torch.nan]):
            block = block.masked_fill(kind == number, value)
        order = CHANNELS_LAST[n + 2] if last else torch.contiguous_format
        blocks.append(block.to(dtype).contiguous(memory_format=order))
    x, functional = blocks
    found = []
    grid = hs.Grid(height=2)
    for given in (hs.shard(x, grid), x):
        given.requires_grad_()
        y = F.interpolate(given, **options)
        weights = hs.shard(functional, grid) if isinstance(y, hs.Sharded) else functional
        (gradient,) = torch.autograd.grad(y, given, weights)
        found.append([t.full() if isinstance(t, hs.Sharded) else t for t in (y, gradient)])
    kinds = [[(t.isnan(), t == torch.inf, t == -torch.inf) for t in both] for both in found]
    return [all(map(torch.equal, *pair)) for pair in zip(*kinds, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (3, {"scale_factor": 2, "mode": "trilinear"}),
        (3, {"scale_factor": 2, "mode": "trilinear", "align_corners": True}),
        (3, {"size": (3, 9, 6), "mode": "trilinear"}),
        (2, {"size": (13, 7), "mode": "bilinear", "align_corners": True}),
        (3, {"scale_factor": 3, "mode": "nearest"}),
    ],
)
def test_unusual_numbers(dtype: torch.dtype, n: int, last: bool, options: dict[str, Any]) -> None:
    assert run_ranks(2, unusual_numbers, dtype, n, last, options) == [[True, True]] * 2


def upsample_modules() -> list[bool]:
    grid = hs.Grid(depth=2, height=2)
    x = torch.randn(1, 2, 5, 6, 3)
    modules = [
        torch.nn.Upsample(scale_factor=2),
        torch.nn.Upsample(size=(9, 7, 5), mode="trilinear", align_corners=True),
    ]
    found = [torch.allclose(m(hs.shard(x, grid)).full(), m(x), atol=1e-6) for m in modules]
    with torch.inference_mode():  # what is remembered here has to serve training too
        F.interpolate(hs.shard(x, grid), size=(4, 5, 6))
    cut = hs.shard(x, grid).requires_grad_()
    y = F.interpolate(cut, size=(4, 5, 6))
    y.sum().backward()
    with pytest.warns(UserWarning, match="deprecated"):
        z = F.upsample(hs.shard(x, grid), size=(4, 5, 6))
    assert cut.grad is not None
    return [*found, torch.equal(y.full(), z.full()), cut.grad.full().sum().item() == 240]


def test_upsample_modules() -> None:
    assert run_ranks(4, upsample_modules) == [[True] * 4] * 4


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
def test_no_samples(mode: str) -> None:
    x = torch.ones(0, 2, 3, 4)
    assert F.interpolate(hs.shard(x, hs.Grid()), scale_factor=2, mode=mode).shape == (0, 2, 6, 8)


def refused(case: str) -> None:
    x = hs.shard(torch.randn(1, 2, 5, 12), hs.Grid(height=2))
    if case == "mode":
        F.interpolate(x, scale_factor=2, mode="trilinear")
    elif case == "both":
        F.interpolate(x, size=4, scale_factor=2)
    elif case == "odd factor":
        F.interpolate(x, scale_factor=1.1, mode="bilinear")
    elif case == "thin":
        F.interpolate(x, size=(8, 1), mode="bilinear", antialias=True)
    elif case == "zero":
        F.interpolate(x, scale_factor=0.1)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("mode", NotImplementedError, "trilinear mode needs 5D input"),
        ("both", ValueError, "only one of size or scale_factor"),
        ("odd factor", hs.LayoutError, "use recompute_scale_factor=True"),
        ("thin", hs.LayoutError, "use antialias=False"),
        ("zero", RuntimeError, "greater than 0"),
    ],
)
def test_what_is_refused(case: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, refused, case)


def planes_read(mode: str, align: bool | None) -> int:
    x = hs.shard(torch.randn(1, 1, 96, 4, 4), hs.Grid(depth=3))
    resize = Resize(mode, (192, 8, 8), None, align, False)
    plan = lay_out_interpolate(
        x.grid, x.partition, resize, BlockKind.of(x.local), "interpolate"
    ).plan
    return plan.wanted.shape[2]


@pytest.mark.parametrize(
    ("mode", "align", "halo"),
    [("nearest", None, 0), ("trilinear", False, 2), ("trilinear", True, 2)],
)
def test_a_rank_reads_its_share(mode: str, align: bool | None, halo: int) -> None:
    """Of 96 planes, a third and what its outermost outputs reach."""
    assert max(run_ranks(3, planes_read, mode, align)) == 96 // 3 + halo
