"""What rules look up for a kind of call holds for that kind alone (tier: a few gloo ranks).

Every test alternates calls that differ in one thing, so that a plan of the one would be taken for
the other if it were kept by too little.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.comm import grid as grid_module
from hyperslab.errors import LayoutError
from hyperslab.ops.views import Span, crop
from tests.ranks import run_ranks

SHAPE = (2, 4, 6, 4, 4)
MATRIX = torch.arange(12.0).view(4, 3) / 7
ROW = torch.linspace(-1, 1, 4).view(4, 1, 1, 1)
DEPTHS = torch.linspace(1, 2, 6).view(6, 1, 1)
LABELS = torch.arange(192).view(2, 6, 4, 4) % 4

Call = Callable[[torch.Tensor], Any]

CALLS: dict[str, Call] = {
    "part": lambda x: x[:, 1:3],
    "part of depth": lambda x: x[:, :, 1:5],
    "an integer": lambda x: x[..., 1],
    "a new dim": lambda x: x[:, None, 0],
    "narrow": lambda x: x.narrow(2, 1, 4),
    "select": lambda x: x.select(2, 3),
    "chunk": lambda x: torch.cat([2 * part for part in x.chunk(2, 1)], 2),
    "chunk of depth": lambda x: x.chunk(2, 2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "reshape": lambda x: x.reshape(2, 4, 6, 16),
    "flatten": lambda x: x.flatten(1),
    "permute": lambda x: x.permute(0, 2, 3, 4, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1, -1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1, 1),
    "repeat depth": lambda x: x.repeat(1, 1, 2, 1, 1),
    "cat": lambda x: torch.cat([x, 2 * x], 2),
    "stack": lambda x: torch.stack([x, 2 * x], 1),
    "matmul": lambda x: x @ MATRIX.to(x.dtype),
    "einsum": lambda x: torch.einsum("bcdhw,ck->bkdhw", x, MATRIX.to(x.dtype)),
    "sum over depth": lambda x: torch.einsum("bcdhw->bc", x),
    "linear": lambda x: F.linear(x, MATRIX.T.to(x.dtype)),
    "pad": lambda x: F.pad(x, (1, 1, 0, 1, 2, 0)),
    "pad by reflection": lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), "reflect"),
    "roll": lambda x: x.roll((1, 1), (2, 3)),
    "sum": lambda x: x.sum((2, 3)),
    "mean": lambda x: x.mean((2, 3, 4)),
    "any": lambda x: (x > 0).any(2),
    "argmax": lambda x: x.argmax(),
    "softmax": lambda x: x.softmax(2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "det": lambda x: torch.linalg.det(x),
    "mse": lambda x: F.mse_loss(x, 2 * x),
    "mse of each": lambda x: F.mse_loss(x, 2 * x, reduction="none"),
    "a scale for each channel": lambda x: x * ROW.to(x.dtype),
    "a scale for each depth": lambda x: DEPTHS.to(x.dtype) * x,
    "a row and a number": lambda x: torch.where(x > 0, x * ROW[0, 0, 0].to(x.dtype), 0.5),
    "a mean of itself": lambda x: x - x.mean((1, 3), keepdim=True),
    "silu": lambda x: F.silu(x),
    "clamp": lambda x: torch.clamp(x, None, 0.5),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "cross entropy": lambda x: F.cross_entropy(x, LABELS),
}


def check(call: Call, x: hs.Sharded, serial: torch.Tensor) -> None:
    """One call on a cut tensor, beside torch's own."""
    found, expected = call(x), call(serial)
    found = found.full() if isinstance(found, hs.Sharded) else found
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)


def whole_cut_and_cut_elsewhere() -> None:
    """Equal shapes, other partitions; equal partitions, other grids."""
    serial = torch.randn(SHAPE, dtype=torch.float64)
    grids = [hs.Grid(depth=2), hs.Grid(height=2), hs.Grid(depth=2), hs.Grid(data=2)]
    kinds = [hs.shard(serial, grid) for grid in grids]
    kinds += [hs.gather(kinds[0], "depth"), hs.shard(serial.flip(2), grids[0]).flip(2)]
    kinds.append(hs.shard(torch.cat([serial[:, :, :2], serial], 2), grids[0])[:, :, 2:])
    for call in CALLS.values():
        for x in [*kinds, *kinds]:
            check(call, x, serial)


def test_a_plan_is_of_one_partition_and_one_grid() -> None:
    run_ranks(2, whole_cut_and_cut_elsewhere)


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_is_of_any_type_and_order(name: str) -> None:
    """Types, memory formats, gradients and autocast in turn, on one rank."""
    call, grid = CALLS[name], hs.Grid()
    plain = torch.randn(SHAPE)
    kinds = [plain, plain.double(), plain.to(memory_format=torch.channels_last_3d)]
    for _ in range(2):
        for serial in kinds:
            check(call, hs.shard(serial, grid), serial)
            with torch.no_grad():
                check(call, hs.shard(serial, grid), serial)
            with torch.inference_mode():
                check(call, hs.shard(serial, grid), serial)
        with torch.autocast("cpu", torch.bfloat16):
            check(call, hs.shard(plain, grid), plain)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_go_where_torchs_go(name: str) -> None:
    """Of a leaf and of what was computed, in turn."""
    call, grid = CALLS[name], hs.Grid()
    gradients = []
    for serial, turn in itertools.product((True, False), range(4)):
        leaf = torch.linspace(-1, 1, 768, dtype=torch.float64).view(SHAPE).requires_grad_()
        x: torch.Tensor = leaf if serial else hs.shard(leaf, grid)
        y = call(x * 1 if turn % 2 else x)
        if not y.requires_grad:
            return
        (y * y).sum().backward()
        gradients.append(leaf.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


NOT_INTEGERS = [
    (slice(1, 3), slice(1.0, 3.0)),
    (1, True),
    (slice(0, 1), slice(False, True)),
    (slice(None, None, 1), slice(None, None, 1.0)),
]


@pytest.mark.parametrize(("index", "other"), NOT_INTEGERS)
def test_numbers_that_are_equal_are_not_the_same_subscript(index: Any, other: Any) -> None:
    """True and 1.0 equal 1: as torch takes them, or refused, before and after a plan is kept."""
    serial = torch.randn(SHAPE)
    x = hs.shard(serial, hs.Grid())
    for _ in range(2):
        torch.testing.assert_close(x[index].full(), serial[index])
        try:
            expected = serial[other]
        except (TypeError, IndexError):
            expected = None
        if expected is None or other is True:
            with pytest.raises((TypeError, IndexError, hs.UnsupportedOp)):
                x[other]
        else:
            torch.testing.assert_close(x[other].full(), expected)


def test_a_refusal_is_not_kept_and_keeps_nothing() -> None:
    """A call that is refused between two that are not, which share all but one argument."""
    serial = torch.randn(SHAPE)
    x = hs.shard(serial, hs.Grid())
    for _ in range(2):
        torch.testing.assert_close(x[:, 3].full(), serial[:, 3])
        with pytest.raises(IndexError):
            x[:, 4]
        with pytest.raises(LayoutError, match="cannot reshape"):
            x.reshape(2, 5, -1)
        with pytest.raises(LayoutError, match="not an order"):
            x.permute(0, 1, 2, 3, 3)
        with pytest.raises(LayoutError, match="matmul: 4 and 5"):
            x @ torch.ones(5, 2)
        with pytest.raises(LayoutError, match="cat along dim 1"):
            torch.cat([x, x[:, :, :2]], 1)
        with pytest.raises(IndexError):
            torch.cat([x, x], 5)
        torch.testing.assert_close(x.transpose(1, 2).full(), serial.transpose(1, 2))
        torch.testing.assert_close(x.unbind(1)[0].full(), serial[:, 0])
        torch.testing.assert_close(torch.cat([x, x], 1).full(), serial.repeat(1, 2, 1, 1, 1))
        for no_dim in (
            lambda: x.transpose(1, 2.0),
            lambda: x.unbind(1.0),
            lambda: torch.cat([x, x], 1.0),
        ):
            with pytest.raises(TypeError):
                no_dim()
        torch.testing.assert_close((x @ MATRIX).full(), serial @ MATRIX)


def views_after_changes() -> None:
    """A view and its base see each other's changes; so do views of views, and parts of copies."""
    grid = hs.Grid(depth=2)
    views: Sequence[Call] = (
        lambda x: x[:, 1:3],
        lambda x: x[:, 2],
        lambda x: x.permute(1, 0, 2, 3, 4),
        lambda x: x.unsqueeze(1),
        lambda x: x.reshape(8, 6, 4, 4),
    )
    several: Sequence[Call] = (lambda x: x.chunk(2, 1)[1], lambda x: x.unbind(1)[1])
    cases = [*itertools.product(views, (False, True)), *((view, False) for view in several)]
    for view, grad in cases:  # torch refuses to change one of several views with a graph
        full = torch.randn(SHAPE, dtype=torch.float64, requires_grad=grad)
        serial, x = full * 1, hs.shard(full, grid) * 1
        for factor in (2, 3):
            mine, its = view(x), view(serial)
            mine.mul_(factor)
            its.mul_(factor)
            x.add_(1)
            serial.add_(1)
            torch.testing.assert_close(view(x).full(), its)
            torch.testing.assert_close(mine.full(), its)
            torch.testing.assert_close(x.full(), serial)


def test_views_of_a_plan_share_memory_with_their_base() -> None:
    run_ranks(2, views_after_changes)


def test_a_part_is_taken_outside_of_rules_too() -> None:
    """What is put off is computed where operators still ask for a rule."""
    serial = torch.randn(SHAPE)
    x = hs.shard(serial, hs.Grid())
    part = crop(x, {2: Span(1, 3)})
    assert type(part) is hs.Sharded
    torch.testing.assert_close(part.full(), serial[:, :, 1:4])


def test_what_is_kept_is_bounded() -> None:
    """More kinds of call than are kept: all are right, and few are left."""
    kept: list[int] = []

    @grid_module.per_grid
    def make(_grid: hs.Grid, number: int) -> int:
        kept.append(number)
        return -number

    grid = hs.Grid()
    for number in [*range(grid_module.MOST_KEPT + 1), 0, 1]:
        assert make(grid, number) == -number
    assert kept.count(0) == 2 == kept.count(1)


def numbers_in_tensors() -> None:
    """Tensors of one number are read at every call: they may have changed."""
    grid = hs.Grid(depth=2)
    serial = torch.randn(SHAPE)
    x = hs.shard(serial, grid)
    number, rest = torch.tensor(1), torch.tensor(3)
    calls: Sequence[Callable[[Any], torch.Tensor]] = (
        lambda x: x.split([number, rest], 1)[0],
        lambda x: x.narrow(2, 1, number),
        lambda x: x.transpose(number, 0),
        lambda x: F.group_norm(x, number.clamp(max=2)),
        lambda x: x.unfold(1, number, 1),
        lambda x: x.unfold(2, 2, number),
    )
    for call, (one, other) in itertools.product(calls, [(1, 3), (2, 2), (1, 3)]):
        number.fill_(one)
        rest.fill_(other)
        torch.testing.assert_close(call(x).full(), call(serial))
    filters = torch.randn(3, 4, 1, 1, 1)
    for convolve in (F.conv3d, F.conv_transpose3d):
        for stride in ((number, 1, 1), [1, 1, number]):
            with pytest.raises(LayoutError, match="use numbers"):
                convolve(x, filters, stride=stride)


def test_numbers_in_tensors_are_read_at_every_call() -> None:
    run_ranks(2, numbers_in_tensors)


def zeros_of_both_signs(shape: tuple[int, ...]) -> None:
    """Padding with 0.0 and with -0.0, which are equal and not the same."""
    serial = torch.randn(shape)
    x = hs.shard(serial, hs.Grid(depth=2))
    for value in (0.0, -0.0, -1.0, -0.0, 0.0):
        y = F.pad(x, (1, 1, 1, 1, 1, 1), value=value).full()
        expected = F.pad(serial, (1, 1, 1, 1, 1, 1), value=value)
        assert torch.equal(y.signbit(), expected.signbit())


@pytest.mark.parametrize("shape", [(1, 1, 4, 2, 2), (1, 1, 64, 32, 32)])
def test_zeros_keep_their_sign(shape: tuple[int, ...]) -> None:
    run_ranks(2, zeros_of_both_signs, shape)


def test_a_conjugate_of_real_numbers_is_the_tensor_itself() -> None:
    """Torch returns its operand: what changes the one in place changes the other."""
    serial = torch.randn(SHAPE, requires_grad=True)
    for whole in (serial, hs.shard(serial, hs.Grid())):
        base = whole * 2
        same = torch.conj_physical(base)
        same.add_(1)
        y = base.full() if isinstance(base, hs.Sharded) else base
        torch.testing.assert_close(y, 2 * serial + 1)
    z = torch.randn(SHAPE, dtype=torch.complex64)
    torch.testing.assert_close(hs.shard(z, hs.Grid()).conj_physical().full(), z.conj())


def filters_before(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Gradients with a graph, after the filters of the pass were changed."""
    torch.manual_seed(0)
    filters = torch.nn.Parameter(torch.randn(5, 4, 3, 3, 3) / 4)
    serial = torch.randn(shape)
    found = []
    for x in (serial.clone(), hs.shard(serial, hs.Grid(depth=2))):
        x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            filters.copy_(torch.linspace(-1, 1, filters.numel()).view_as(filters))
        with torch.autocast("cpu", torch.bfloat16):
            y = F.conv3d(x, filters, padding=1).float().square().sum()
        with torch.no_grad():
            filters.mul_(-3)
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), filters)
        if isinstance(gradient, hs.Sharded):
            gradient = gradient.full()
        found += [gradient.detach(), second]
    return found


@pytest.mark.parametrize("shape", [SHAPE, (2, 4, 16, 16, 16)])
def test_gradients_are_those_of_the_filters_of_the_forward_pass(shape: tuple[int, ...]) -> None:
    """Not of what has become of them since, as after a step of the optimizer."""
    for serial, second, mine, own in run_ranks(2, filters_before, shape):
        assert (mine - serial).norm() < 0.02 * serial.norm()
        assert (own - second).norm() < 0.05 * second.norm()
