"""Channels that are joined window by window equal plain torch (tiers: no process; gloo ranks)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.models import UNet3D
from hyperslab.ops.slabs import DeferredJoin, DeferredUpsampling, SlabEpilogue
from hyperslab.parallel.parallelize import Memory
from tests.ops.convolution.test_conv import conv
from tests.ops.convolution.test_conv_transpose import examples as transposed_ones
from tests.ops.convolution.test_conv_transpose import transposed
from tests.ops.serial import RANKS, Example, compare, distance, draw_examples
from tests.ops.slabs.test_stages import LargestTensor, cut_for_slabs, slabs_of
from tests.ranks import run_ranks
from tests.selection import in_gate

MEMORY: tuple[Memory, ...] = ("tile", "recompute")


def joined(
    x: Any,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    skip: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    order: str,
    of_conv: dict[str, Any],
    norm: bool,
    slope: float | None,
    planes: int,
    **options: Any,
) -> Any:
    """A convolution of upsampled (u) and skipped (s) channels side by side."""
    with slabs_of(planes):
        x = cut_for_slabs(x)
        parts = {"u": transposed(x, up, up_bias, **options)}
        if "s" in order:
            parts["s"] = transposed(x, skip, None, **options) * 0.7
        y = conv(torch.cat([parts[kind] for kind in order], 1), weight, bias, **of_conv)
        if norm:
            y = F.instance_norm(y)
        if slope is not None:
            y = F.leaky_relu(y, slope)
        return y * 1.5


@st.composite
def joins(draw: st.DrawFn, ranks: int) -> Example:
    """Any transposed convolution, joined in any order, under any convolution of stride 1."""
    example: Example = draw(transposed_ones(ranks))
    up, up_bias = example.weights
    assert up is not None
    channels = up[1] * example.options["groups"]
    order = draw(st.sampled_from(["us", "su", "sus", "uu", "u"]))
    kernel = [draw(st.integers(1, 3)) for _ in up[2:]]
    padding = [draw(st.integers(k - 1, k)) for k in kernel]
    groups = draw(st.sampled_from([1, 1, len(order)]))
    filters = 2 * groups
    # Channels that are multiples of each other leave no gradient behind a normalisation.
    norm = "s" in order and math.prod(kernel) > 1 and draw(st.booleans())
    return replace(
        example,
        weights=(
            up,
            up_bias,
            up,
            (filters, channels * len(order) // groups, *kernel),
            (filters,) if not norm and draw(st.booleans()) else None,
        ),
        options={
            **example.options,
            "order": order,
            "of_conv": {"padding": padding, "groups": groups},
            "norm": norm,
            "slope": draw(st.sampled_from([None, 0.0, 0.1])),
            "planes": draw(st.integers(0, 2)),
        },
        dtype=torch.float32 if norm else example.dtype,
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_join(ranks: int) -> None:
    run_ranks(ranks, compare, joined, draw_examples(joins(ranks), 24))


def unet(memory: Memory, axes: dict[str, int], shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits, gradients and running statistics of a step, the same on all ranks."""
    torch.manual_seed(0)
    model = UNet3D(2, 3, channels=4, levels=2)
    x = torch.randn(*shape)
    grid = hs.Grid(**axes)
    with slabs_of(1):
        hs.parallelize(model, grid, memory=memory)
        y = model(hs.shard(x, grid))
        y.square().mean().backward()
        logits = y.full().detach()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [logits, *gradients, *(b.double() for b in model.buffers())]


def unets(axes: dict[str, int], shape: tuple[int, ...]) -> float:
    expected = unet("none", axes, shape)
    found = [unet(memory, axes, shape) for memory in MEMORY]
    return max(distance(b, a) for other in found for a, b in zip(expected, other, strict=True))


REPLICAS = {"data": 2, "height": 2}


@pytest.mark.parametrize("axes", in_gate([{"depth": 2}, REPLICAS], kept=[REPLICAS]), ids=str)
def test_a_unet_on_a_grid(axes: dict[str, int]) -> None:
    assert max(run_ranks(2 * len(axes), unets, axes, (2, 2, 12, 16, 9))) < 1e-4


@pytest.mark.parametrize("memory", ["tile", "recompute"])
def test_neither_the_joined_channels_nor_the_upsampled_ones_ever_exist(memory: Memory) -> None:
    """Neither forward nor backward: the widest tensor is half of the map at full resolution."""
    torch.manual_seed(0)
    model = UNet3D(1, 2, channels=4, levels=1)
    x = torch.randn(1, 1, 16, 12, 12)
    voxels = x[0, 0].numel()
    with slabs_of(1):
        hs.parallelize(model, hs.Grid(), memory=memory)
        with LargestTensor() as largest:
            model(hs.shard(x, hs.Grid())).sum().backward()
    assert largest.elements == 8 * voxels  # not the 16 that were upsampled, nor the 24 joined


def upsampled_and_skipped() -> tuple[Any, Any]:
    x = cut_for_slabs(hs.shard(torch.randn(1, 3, 8, 8, 8), hs.Grid()))
    up = F.conv_transpose3d(x, torch.randn(3, 4, 2, 2, 2), stride=2)
    skip = cut_for_slabs(hs.shard(torch.randn(1, 2, 16, 16, 16), hs.Grid()))
    return up, skip


def test_every_use_of_a_join_sees_it() -> None:
    with slabs_of(1):
        up, skip = upsampled_and_skipped()
        y = torch.cat([up, skip], 1)
        assert isinstance(up.pending, DeferredUpsampling)
        assert isinstance(y.pending, DeferredJoin)
        assert torch.equal(y.local, torch.cat([up.local, skip.local], 1))


@pytest.mark.parametrize("what", ["up", "skip"])
def test_a_part_that_changes_in_place_leaves_the_join_as_it_was(what: str) -> None:
    """As in serial torch, where the join is a copy; also when it was convolved already."""
    weight = torch.randn(3, 6, 3, 3, 3)
    with slabs_of(1), torch.no_grad():
        up, skip = upsampled_and_skipped()
        y = torch.cat([up, skip], 1)
        expected = torch.cat([up.block.clone(), skip.block.clone()], 1)
        convolved = F.conv3d(y, weight)
        (up if what == "up" else skip).add_(1)
        assert distance(y.full(), expected) < 1e-6
        assert distance(convolved.full(), F.conv3d(expected, weight)) < 1e-5


@pytest.mark.parametrize("what", ["up", "join"])
@pytest.mark.parametrize("when", ["joined", "convolved"])
def test_a_gradient_that_somebody_watches_is_whole_or_refused(what: str, when: str) -> None:
    weight = torch.randn(3, 6, 3, 3, 3)
    found = []
    for cut in (False, True):
        torch.manual_seed(4)
        x, skip = torch.randn(1, 3, 8, 8, 8, requires_grad=True), torch.randn(1, 2, 16, 16, 16)
        with slabs_of(1):
            if cut:
                x, skip = (cut_for_slabs(hs.shard(t, hs.Grid())) for t in (x, skip))
            up = F.conv_transpose3d(x, torch.randn(3, 4, 2, 2, 2), stride=2)
            join = torch.cat([up, skip], 1)
            watched = up if what == "up" else join
            if when == "convolved":
                y = F.conv3d(join, weight)
                if cut:
                    with pytest.raises(hs.LayoutError, match="does not come through"):
                        watched.retain_grad()
                    return
            watched.retain_grad()
            y = F.conv3d(join, weight)
            y.square().sum().backward()
        gradient = watched.grad
        found.append(gradient.full() if isinstance(gradient, hs.Sharded) else gradient)
    assert distance(*found) < 1e-5


def test_an_alias_that_changes_before_the_join_is_used_is_refused() -> None:
    with slabs_of(1):
        up, skip = upsampled_and_skipped()
        alias = skip.local
        y = torch.cat([up, skip], 1)
        alias.add_(1)
        with pytest.raises(hs.LayoutError, match=r"what torch\.cat joins .* was changed in place"):
            y.sum()


def test_a_gradient_of_a_join_can_be_differentiated_again() -> None:
    found = []
    for cut in (False, True):
        torch.manual_seed(2)
        x = torch.randn(1, 3, 6, 6, 6, requires_grad=True)
        up = torch.randn(3, 4, 2, 2, 2, requires_grad=True)
        weight = torch.randn(3, 7, 3, 3, 3, requires_grad=True)
        with slabs_of(1):
            given = cut_for_slabs(hs.shard(x, hs.Grid())) if cut else x
            wide = F.conv_transpose3d(given, up, stride=2)
            skip = wide[:, :3] * 1
            y = F.leaky_relu(
                F.conv3d(torch.cat([F.conv_transpose3d(given, up, stride=2), skip], 1), weight), 0.1
            )
            if cut:
                assert isinstance(y.pending, SlabEpilogue)
            y = y.full() if cut else y
            (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
        found.append([x.grad, up.grad, weight.grad])
    assert all(distance(b, a) < 1e-4 for a, b in zip(*found, strict=True))
