"""Runs the distributed convolution that costs nothing extra: local convolution plus halo slabs.

A convolution is linear, so its result is the local convolution with zeros at the cut plus the
contribution of the halo alone. The halo of a block is tiled by *slabs*, two per cut dim: a slab
of the first cut dim spans the halos of the later ones, a slab of the last cut dim spans none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.comm.exchange import add_returned, copy_overlap, new_box, start, start_adjoint
from hyperslab.geometry import Box
from hyperslab.kernels.conv import RecomputedInput, SavedInput, conv_backward, conv_forward
from hyperslab.kernels.conv_problem import Kernels
from hyperslab.ops.convolution.buffered import ConvSpec, backward_with_graph


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of outputs and the planes of a slab that it reads.

    ``output``: index in the local output; ``first``, ``planes``: which planes of the slab, with
    the dilation between them, meet the taps ``tap .. tap + planes`` of the kernel.
    """

    output: int
    first: int
    planes: int
    tap: int


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of the halo: where it lies, how it is padded, which outputs it touches."""

    dim: int  # tensor dim across which it lies
    box: Box
    padding: tuple[int, ...]
    outputs: tuple[Plane, ...]


def aligned(spec: ConvSpec) -> bool:
    """Tell if the plain convolution of the own block yields exactly this rank's outputs."""
    own = spec.plan.own
    out = spec.out
    for dim, window in enumerate(spec.windows, start=2):
        lo, hi = own.interval(dim)
        first = out.lo[dim] * window.stride
        count = window.outputs(hi - lo)
        if window.before != window.after or lo != first or count != out.shape[dim]:
            return False
    return True


SMALL_BLOCK = 1 << 20
"""Elements of a block that is copied in less time than the slabs' own kernels are called."""


def thin(spec: ConvSpec) -> bool:
    """Tell if one convolution of block and halo together costs less than one of each."""
    own = spec.plan.own.size
    return 2 * spec.plan.wanted.size > 3 * own or own <= SMALL_BLOCK


def slabs_of(spec: ConvSpec) -> tuple[Slab, ...]:
    """Return the slabs that tile this rank's halo inside the volume."""
    own = spec.plan.own
    reads = spec.plan.wanted
    inside = _bounding(spec)
    slabs = []
    for dim in range(2, own.ndim):
        for lo, hi in ((inside.lo[dim], own.lo[dim]), (own.hi[dim], inside.hi[dim])):
            if lo < hi and spec.covered[dim - 2]:
                # Earlier dims as the block, later ones with their halo and padding.
                intervals = [own.interval(d) for d in range(dim)] + [(lo, hi)]
                intervals += [reads.interval(d) for d in range(dim + 1, own.ndim)]
                slabs.append(_slab(spec, dim, Box.of(intervals)))
    return tuple(slabs)


def _bounding(spec: ConvSpec) -> Box:
    """The wanted box without the padding: what this rank owns or receives."""
    boxes = [spec.plan.own, *(t.box for t in spec.plan.receives)]
    lo = tuple(map(min, *(box.lo for box in boxes))) if len(boxes) > 1 else boxes[0].lo
    hi = tuple(map(max, *(box.hi for box in boxes))) if len(boxes) > 1 else boxes[0].hi
    return Box(lo, hi)


def _slab(spec: ConvSpec, dim: int, box: Box) -> Slab:
    padding = [w.before for w in spec.windows]
    for later in range(dim, box.ndim):
        if later == dim or spec.covered[later - 2]:
            padding[later - 2] = 0
    window = spec.windows[dim - 2]
    planes = []
    for output in range(*spec.out.interval(dim)):
        tap, end = window.taps(output, box.interval(dim))
        if tap < end:
            first = output * window.stride - window.before + tap * window.dilation - box.lo[dim]
            planes.append(Plane(output - spec.out.lo[dim], first, end - tap, tap))
    return Slab(dim, box, tuple(padding), tuple(planes))


class SlabConv(torch.autograd.Function):
    """Convolves where the windows line up with the cut.

    Distribution scheme, forward: 1. send boundary planes, 2. convolve the block with the layer's
    own padding while they travel, 3. add each slab's convolution to the few output planes that
    it touches. Backward: 1. gradients of the slabs, sent home, 2. gradients of the block, weight
    and bias while they travel, 3. add what came home; or `backward_with_graph`. Saved: the block
    (the producer's own tensor, or what ``source`` makes it of) and the thin slabs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        spec: ConvSpec,
        slabs: tuple[Slab, ...],
        kernels: Kernels,
        source: RecomputedInput | None,
    ) -> torch.Tensor:
        pending = start(x, spec.plan, spec.name)
        padding = [w.before for w in spec.windows]
        y = conv_forward(x, weight, bias, spec.options, padding, kernels)
        halos = _fill_slabs(x, pending.wait(), spec, slabs)
        for slab, halo in zip(slabs, halos, strict=True):
            for plane in slab.outputs:
                part = conv_forward(
                    _planes(halo, slab, plane, spec),
                    _taps(weight, slab, plane),
                    None,
                    spec.options,
                    slab.padding,
                    kernels,
                )
                y.narrow(slab.dim, plane.output, 1).add_(part)
        kept = SavedInput(x, source)
        ctx.value = kept.value
        ctx.spec = spec
        ctx.slabs = slabs
        ctx.kernels = kernels
        ctx.has_bias = bias is not None
        ctx.save_for_backward(weight, *halos, *kept.tensors)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spec = ctx.spec
        slabs = ctx.slabs
        kernels = ctx.kernels
        weight, *saved = ctx.saved_tensors
        halos = saved[: len(slabs)]
        x = ctx.value(tuple(saved[len(slabs) :]))
        needs = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
        if torch.is_grad_enabled():
            return *backward_with_graph(gradient, x, weight, spec, needs), *[None] * 4
        grads = [
            _slab_backward(gradient, halo, weight, spec, slab, needs, kernels)
            for slab, halo in zip(slabs, halos, strict=True)
        ]
        pending = None
        if needs[0]:
            dhalos = [dhalo for dhalo, _ in grads if dhalo is not None]
            pieces = _pieces_of_slabs(dhalos, spec, slabs)
            pending = start_adjoint(pieces, gradient, spec.plan, spec.name)
        padding = [w.before for w in spec.windows]
        dx, dw, db = conv_backward(gradient, x, weight, spec.options, padding, needs, kernels)
        if dw is not None:
            for slab, (_, taps) in zip(slabs, grads, strict=True):
                for plane, dtaps in zip(slab.outputs, taps, strict=True):
                    _taps(dw, slab, plane).add_(dtaps)
        if pending is not None and dx is not None:
            add_returned(dx, pending.wait(), spec.plan)
        return dx, dw, db, *[None] * 4


def _planes(halo: torch.Tensor, slab: Slab, plane: Plane, spec: ConvSpec) -> torch.Tensor:
    step = spec.windows[slab.dim - 2].dilation
    return halo.narrow(slab.dim, plane.first, (plane.planes - 1) * step + 1)


def _taps(weight: torch.Tensor, slab: Slab, plane: Plane) -> torch.Tensor:
    return weight.narrow(slab.dim, plane.tap, plane.planes)


def _fill_slabs(
    x: torch.Tensor, pieces: list[torch.Tensor], spec: ConvSpec, slabs: tuple[Slab, ...]
) -> list[torch.Tensor]:
    halos = []
    parts = [(t.box, piece) for t, piece in zip(spec.plan.receives, pieces, strict=True)]
    for slab in slabs:
        whole = [piece for box, piece in parts if box == slab.box]
        if whole:
            halos.append(whole[0])
            continue
        halo = new_box(slab.box, [box for box, _ in parts], x)
        for box, piece in parts:
            copy_overlap(halo, slab.box, piece, box)
        halos.append(halo)
    return halos


def _slab_backward(
    gradient: torch.Tensor,
    halo: torch.Tensor,
    weight: torch.Tensor,
    spec: ConvSpec,
    slab: Slab,
    needs: list[bool],
    kernels: Kernels,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradient of one slab and of the kernel taps of each of its planes."""
    whole = len(slab.outputs) == 1 and slab.outputs[0].planes == halo.shape[slab.dim]
    dhalo = torch.zeros_like(halo) if needs[0] and not whole else None
    taps = []
    for plane in slab.outputs:
        out = gradient.narrow(slab.dim, plane.output, 1)
        dx, dw, _ = conv_backward(
            out,
            _planes(halo, slab, plane, spec),
            _taps(weight, slab, plane),
            spec.options,
            slab.padding,
            [needs[0], needs[1], False],
            kernels,
        )
        if dhalo is None:
            dhalo = dx
        elif dx is not None:
            _planes(dhalo, slab, plane, spec).add_(dx)
        if dw is not None:
            taps.append(dw)
    return dhalo, taps


def _pieces_of_slabs(
    dhalos: Sequence[torch.Tensor], spec: ConvSpec, slabs: tuple[Slab, ...]
) -> list[torch.Tensor]:
    """The gradient of each received piece; every piece lies in exactly one slab."""
    pieces = []
    for t in spec.plan.receives:
        slab, dhalo = next(
            (s, d) for s, d in zip(slabs, dhalos, strict=True) if s.box.contains(t.box)
        )
        pieces.append(dhalo[t.box.slices(slab.box)])
    return pieces
