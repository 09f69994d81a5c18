"""Where adaptive pooling lies: windows that follow from the two extents.

Legend: a *spatial dim* is counted from 0 after batch and channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyperslab.comm import Grid, log_once, per_grid, plan_exchange
from hyperslab.comm.exchange import ExchangePlan, fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import AdaptiveWindow, Box, Interval, Partition
from hyperslab.ops.common.placement import check_input, output_partition, read_cover
from hyperslab.tensor import Sharded


@dataclass(frozen=True, slots=True)
class Spans:
    """Along one spatial dim, the ``inputs`` of every output in a block of them; may be none.

    ``counts`` has how many inputs the windows have in the whole volume.
    """

    dim: int
    inputs: tuple[Interval, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdaptiveLayout:
    """One rank's geometry of an adaptive pooling; made once per (partition, sizes).

    A cut dim with fewer outputs than ranks stays as it is cut: every rank pools its part of every
    window, and the parts are brought together along the axes ``shared``. Along the other cut dims
    the output is cut in proportion, and a rank fetches its outputs' windows.
    """

    input: Partition
    output: Partition
    plan: ExchangePlan
    spans: tuple[Spans, ...]  # of the cut dims
    shared: tuple[str, ...]
    sizes: tuple[int, ...]  # the output block's spatial extents

    def fetch(self, x: Sharded, name: str) -> torch.Tensor:
        """This rank's windows, as far as it pools them."""
        x = x.redistribute(self.input, f"the gather before {name}")
        return fetch(x.block, self.plan, what=f"the halo exchange of {name}")

    @property
    def held(self) -> Box:
        """What `fetch` returns, in global indices."""
        return self.plan.wanted


def layout_of(x: Sharded, sizes: tuple[int, ...], name: str) -> AdaptiveLayout:
    """The layout of an adaptive pooling to ``sizes``."""
    return _lay_out(x.grid, x.partition, sizes, name)


@per_grid
def _lay_out(grid: Grid, x: Partition, sizes: tuple[int, ...], name: str) -> AdaptiveLayout:
    x = x.without([cut.axis for cut in x.cuts[2:] if cut is not None and cut.thin])
    given = x.cuts[2:]
    windows = [AdaptiveWindow(e, s) for e, s in zip(x.shape[2:], sizes, strict=True)]
    shared = [c.axis for c, s in zip(given, sizes, strict=True) if c is not None and s < c.parts]
    cuts = [
        None if c is None or c.axis in shared else w.cut_outputs(c, s)
        for c, w, s in zip(given, windows, sizes, strict=True)
    ]
    output = output_partition(x, x.shape[1], sizes, cuts)
    cover = read_cover(x, windows, cuts, sizes, [cut is not None for cut in cuts])
    plan = plan_exchange(x, cover, grid)
    out = output.box(grid.coords)
    spans = tuple(
        _spans(d, windows[d], out.interval(d + 2), plan.wanted.interval(d + 2))
        for d in range(len(sizes))
        if given[d] is not None
    )
    if any(c is not None and c.axis in shared and s > 1 for c, s in zip(given, sizes, strict=True)):
        log_once(
            grid,
            f"{name}: output {' x '.join(map(str, sizes))} is too thin to be cut along "
            f"{', '.join(shared)} of {grid}: its ranks repeat the work from here on",
        )
    return AdaptiveLayout(x, output, plan, spans, tuple(shared), out.shape[2:])


def _spans(dim: int, window: AdaptiveWindow, out: Interval, held: Interval) -> Spans:
    reads = [window.reads((o, o + 1)) for o in range(*out)]
    parts = ((max(lo, held[0]) - held[0], min(hi, held[1]) - held[0]) for lo, hi in reads)
    inputs = tuple((lo, hi) if lo < hi else (0, 0) for lo, hi in parts)
    return Spans(dim, inputs, tuple(hi - lo for lo, hi in reads))


def sizes_of(
    x: Sharded, n: int, output_size: int | Sequence[int | None] | None, name: str
) -> tuple[int, ...]:
    """The output's spatial extents; ``None`` keeps the input's."""
    check_input(x, n, name)
    given: list[int | None]
    if output_size is None or isinstance(output_size, int):
        given = [output_size] * n
    else:
        given = list(output_size)
    if len(given) != n:
        raise ValueError(f"{name}: output_size {output_size} should be one number or {n}")
    sizes = tuple(e if s is None else int(s) for s, e in zip(given, x.shape[2:], strict=True))
    if min(sizes) < 1 or min(x.shape[2:]) < 1:
        raise LayoutError(
            f"{name} of {x.partition} on {x.grid} to {sizes} leaves nothing\n"
            "    use an output_size of at least 1 on an input that is not empty"
        )
    return sizes
