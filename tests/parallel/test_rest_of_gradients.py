"""Parameters that a loss does not use are as in serial torch (tier: a few gloo ranks)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from tests.ranks import run_ranks
from tests.selection import by_rotation

Gradients = list[torch.Tensor | None]


class OwnPass(torch.autograd.Function):
    """A block of a reversible network: its backward runs a pass and returns None for others."""

    @staticmethod
    def forward(ctx: Any, x: Any, block: nn.Module, *parameters: nn.Parameter) -> Any:
        ctx.block, ctx.count = block, len(parameters)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(gradient)
        return x.grad, None, *[None] * ctx.count


class Branches(nn.Module):
    """Two branches, of which a step uses those it is told, and a head that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 2, 3, padding=1)
        self.second = nn.Conv3d(1, 2, 3, padding=1)
        self.head = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.ones(2, 1, 1, 1))

    def forward(self, x: Any, which: str, recomputed: bool = False) -> Any:
        if which == "own":  # the scale gets nothing
            y = OwnPass.apply(x, self.first, *self.first.parameters(), self.scale)
            return OwnPass.apply(y[:, :1], self.second, *self.second.parameters())
        branches = [b for name, b in (("a", self.first), ("b", self.second)) if name in which]
        if recomputed:
            return [checkpoint(branch, x, use_reentrant=True) for branch in branches]
        return [branch(x) * self.scale for branch in branches]


def loss_of(outputs: list[Any]) -> Any:
    return sum(y.square().mean() for y in outputs)


def of(model: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def by_turns(model: Branches, x: Any) -> list[Gradients]:
    """Steps of Adam; gradients are set to None, or to zero, or accumulate."""
    adam = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    found = []
    for step, which in enumerate(["a", "b", "ab", "a", "b"]):
        if step != 3:
            adam.zero_grad(set_to_none=step != 2)
        loss_of(model(x, which)).backward()
        adam.step()
        found.append(of(model))
    return [*found, [p.detach().clone() for p in model.parameters()]]


def accumulated(model: Branches, x: Any) -> list[Gradients]:
    """What the step that is averaged does not use was used before."""
    quiet = getattr(model, "no_sync", nullcontext)
    with quiet():
        loss_of(model(x, "b")).backward()
    loss_of(model(x, "a")).backward()
    found = [of(model)]
    loss_of(model(x, "a")).backward()  # what is averaged stays so
    return [*found, of(model)]


def recomputed(model: Branches, x: Any) -> list[Gradients]:
    """Re-entrant checkpointing runs backward passes inside the one that counts."""
    found = []
    for which in ("b", "ab"):
        model.zero_grad()
        loss_of(model(x.clone().requires_grad_(), which, True)).backward()
        found.append(of(model))
    return found


def two_losses(model: Branches, x: Any) -> list[Gradients]:
    """Two backward passes through one forward, of different parameters."""
    first, second = (y.square().mean() for y in model(x.clone().requires_grad_(), "ab", True))
    first.backward()
    second.backward()
    return [of(model)]


def passes_of_its_own(model: Branches, x: Any) -> list[Gradients]:
    found = []
    for _ in range(2):
        model(x.clone().requires_grad_(), "own").square().mean().backward()
        found.append(of(model))
    return found


PROGRAMS: list[Callable[[Branches, Any], list[Gradients]]] = [
    by_turns, accumulated, recomputed, two_losses, passes_of_its_own,
]  # fmt: skip


def gradients(
    program: Callable[[Branches, Any], list[Gradients]],
    axes: dict[str, int] | None,
    dtype: torch.dtype,
    shared: bool = True,
) -> list[Gradients]:
    torch.manual_seed(0)
    model = Branches().to(dtype)
    x = torch.randn(2, 1, 8, 6, 4, dtype=dtype)
    if axes is None:
        return program(model, x)
    grid = hs.Grid(**axes)
    chosen = nullcontext() if shared else patch("hyperslab.parallel.parallelize._can_share", no)
    with chosen:
        hs.parallelize(model, grid)
    return program(model, hs.shard(x, grid))


def no(*_: object) -> bool:
    return False


GRIDS = [{"depth": 2}, {"data": 2}, {"data": 2, "depth": 2}, {"depth": 3}]


@pytest.mark.parametrize(
    ("axes", "dtype"), by_rotation(GRIDS, [torch.float64, torch.float32]), ids=str
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_equal_to_serial(
    program: Callable[[Branches, Any], list[Gradients]], axes: dict[str, int], dtype: torch.dtype
) -> None:
    check(program, axes, dtype, shared=True)


@pytest.mark.parametrize("program", PROGRAMS[:3], ids=lambda p: p.__name__)
def test_by_torchs_own_average(program: Callable[[Branches, Any], list[Gradients]]) -> None:
    check(program, {"data": 2, "depth": 2}, torch.float64, shared=False)


def check(
    program: Callable[[Branches, Any], list[Gradients]],
    axes: dict[str, int],
    dtype: torch.dtype,
    *,
    shared: bool,
) -> None:
    expected = run_ranks(1, gradients, program, None, dtype)[0]
    assert any(gradient is None for gradient in expected[0])
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    for found in run_ranks(math.prod(axes.values()), gradients, program, axes, dtype, shared):
        for got, want in zip(found, expected, strict=True):
            for g, w in zip(got, want, strict=True):
                assert (g is None) == (w is None)
                if g is not None and w is not None:
                    assert (g - w).norm() <= tolerance * max(1.0, w.norm().item())


def refused_by_torch(program: Callable[[Branches, Any], list[Gradients]]) -> None:
    """DistributedDataParallel averages once for a forward pass."""
    gradients(program, {"depth": 2}, torch.float64, shared=False)


@pytest.mark.parametrize("program", PROGRAMS[3:], ids=lambda p: p.__name__)
def test_two_passes_by_torchs_own_average(
    program: Callable[[Branches, Any], list[Gradients]],
) -> None:
    with pytest.raises(hs.LayoutError, match="a second backward pass through one forward"):
        run_ranks(2, refused_by_torch, program)


class NoGradient(nn.Module):
    """Its scale gets None from a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(1, 1, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return OwnPass.apply(x, self.layer, self.scale)


def no_gradient(shared: bool) -> None:
    grid, model = hs.Grid(depth=2), NoGradient()
    with nullcontext() if shared else patch("hyperslab.parallel.parallelize._can_share", no):
        hs.parallelize(model, grid)
    for _ in range(2):
        model(hs.shard(torch.ones(1, 1, 6, 4, 4, requires_grad=True), grid)).sum().backward()
    assert model.scale.grad is None


def test_a_function_that_returns_none_for_a_parameter() -> None:
    run_ranks(2, no_gradient, True)
    with pytest.raises(hs.LayoutError, match="returned None for the parameter scale"):
        run_ranks(2, no_gradient, False)


class SharedInCheckpoints(nn.Module):
    """Its parameters get their gradients in two passes within one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x: Any, *, reentrant: bool) -> Any:
        parts = [checkpoint(self.layer, x, use_reentrant=reentrant) for _ in range(2)]
        return sum(y.square().mean() for y in parts)


def shared_in_checkpoints(reentrant: bool) -> None:
    grid = hs.Grid(depth=2)
    model = hs.parallelize(SharedInCheckpoints(), grid)
    x = hs.shard(torch.randn(1, 1, 6, 4, 4, requires_grad=True), grid)
    model(x, reentrant=reentrant).backward()


def test_checkpoints_that_share_parameters() -> None:
    run_ranks(2, shared_in_checkpoints, False)
    with pytest.raises(hs.LayoutError, match="share parameters need use_reentrant=False"):
        run_ranks(2, shared_in_checkpoints, True)


def checkpointed(model: nn.Module, x: torch.Tensor) -> list[Gradients]:
    """A checkpoint around the whole module, whose bias has its gradient before it is recomputed."""
    checkpoint(model, x, use_reentrant=False).square().mean().backward()
    return [of(model)]


def around_all() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 6, 4, 3, dtype=torch.float64, requires_grad=True)
    model = nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)).double()
    (want,) = checkpointed(deepcopy(model), x)
    grid = hs.Grid(depth=2)
    (got,) = checkpointed(hs.parallelize(model, grid), hs.shard(x, grid))
    for g, w in zip(got, want, strict=True):
        assert g is not None
        assert w is not None
        assert torch.allclose(g, w, rtol=1e-10, atol=1e-12)


def test_a_checkpoint_around_the_module() -> None:
    run_ranks(2, around_all)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def said() -> list[str]:
    log = logging.getLogger("hyperslab")
    handler = Lines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        gradients(by_turns, {"depth": 2}, torch.float32)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return [line for line in handler.lines if "gradient" in line]


def test_it_is_said_once() -> None:
    first, second = run_ranks(2, said)
    assert len(first) == 1
    assert not second
    assert "4 of 7 parameters of Branches" in first[0]
    assert "second.weight, second.bias, head.weight, ..." in first[0]


def hooked() -> list[str]:
    """Two steps of two parameters with hooks of the user's."""
    grid, handler = hs.Grid(depth=2), Lines()
    model = hs.parallelize(nn.Conv3d(1, 1, 3, padding=1), grid)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
    logging.getLogger("hyperslab").addHandler(handler)
    try:
        for _ in range(2):
            model(hs.shard(torch.ones(1, 1, 6, 4, 4), grid)).square().mean().backward()
    finally:
        logging.getLogger("hyperslab").removeHandler(handler)
    return handler.lines


def test_hooks_on_parameters_are_warned_of() -> None:
    (line,), others = run_ranks(2, hooked)
    assert not others
    assert "a hook on a parameter of Conv3d sees this rank's part of the gradient" in line


def penalised(parallel: bool) -> list[str]:
    """Second derivatives, and a use of the weight by itself; the warnings that come."""
    grid, handler, model = hs.Grid(depth=2), Lines(), nn.Conv3d(1, 1, 3, padding=1)
    if parallel:
        hs.parallelize(model, grid)
    logging.getLogger("hyperslab").addHandler(handler)
    try:
        x = hs.shard(torch.ones(1, 1, 6, 4, 4), grid).requires_grad_()
        y = model(x).square()
        found = torch.autograd.grad(y.sum(), [x, *model.parameters()], create_graph=True)
        alone = nn.functional.conv3d(x, model.weight, padding=1).mean()
        (sum(g.square().sum() for g in found) + alone).backward()
    finally:
        logging.getLogger("hyperslab").removeHandler(handler)
    return [line for line in handler.lines if "is not parallelised" in line]


def test_what_is_averaged_anyway_is_not_warned_of() -> None:
    assert run_ranks(2, penalised, True) == [[], []]
    (line,), _ = run_ranks(2, penalised, False)
    assert "the ranks' weights drift apart" in line


OF_REPLICAS = [("ab", "ab"), ("a", "b"), ("ab", "a"), ("b", "b"), ("b", "ab"), ("ab", "ab")]
"""The branches that the samples of even and of odd replicas take, step by step."""


def by_replica(axes: dict[str, int], way: str, rounds: int) -> list[Gradients]:
    """Steps of Adam, which forgets nothing, where each replica has branches of its own."""
    torch.manual_seed(0)
    model = Branches().double()
    replicas = axes["data"]
    x = torch.randn(replicas, 1, 8, 6, 4, dtype=torch.float64)
    serial = way == "serial"
    grid = hs.Grid() if serial else hs.Grid(**axes)
    if not serial:
        never = patch("hyperslab.parallel.parallelize._can_share", no)
        with never if way == "torch" else nullcontext():
            hs.parallelize(model, grid)
    adam = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    found = []
    for step, branches in enumerate(OF_REPLICAS):
        if step != 3:
            adam.zero_grad(set_to_none=step != 4)
        for turn in range(rounds):
            if serial:
                for replica, sample in enumerate(x.split(1)):
                    y = sum(model(sample, branches[(replica + turn) % 2]))
                    (y.square().mean() / replicas).backward()
                continue
            # Accumulated without an average, but for the last.
            with model.no_sync() if turn < rounds - 1 else nullcontext():  # type: ignore[operator]
                y = sum(model(hs.shard(x, grid), branches[(grid.coords["data"] + turn) % 2]))
                y.square().mean().backward()
        adam.step()
        found.append(of(model))
    return [*found, [p.detach().clone() for p in model.parameters()]]


WAYS = [(way, rounds) for way in ("shared memory", "torch") for rounds in (1, 2)]


@pytest.mark.parametrize(
    ("way_and_rounds", "axes"),
    by_rotation(WAYS, [{"data": 2}, {"data": 3}, {"data": 2, "depth": 2}]),
    ids=str,
)
def test_replicas_that_use_different_parameters(
    axes: dict[str, int], way_and_rounds: tuple[str, int]
) -> None:
    """What a replica does not use has no gradient from it; None only what nobody uses."""
    way, rounds = way_and_rounds
    expected = run_ranks(1, by_replica, axes, "serial", rounds)[0]
    for found in run_ranks(math.prod(axes.values()), by_replica, axes, way, rounds):
        for step, (got, want) in enumerate(zip(found, expected, strict=True)):
            for g, w in zip(got, want, strict=True):
                assert (g is None) == (w is None), step
                if g is not None and w is not None:
                    assert (g - w).norm() <= 1e-11 * max(1.0, w.norm().item()), step


def in_two_losses(serial: bool) -> list[Gradients]:
    """Of two backward passes through one forward each replica sends the other branch first."""
    torch.manual_seed(0)
    model = Branches().double()
    x = torch.randn(2, 1, 8, 6, 4, dtype=torch.float64)
    grid = hs.Grid() if serial else hs.Grid(data=2)
    if serial:
        for sample in x.requires_grad_().split(1):
            sum(y.square().mean() / 2 for y in model(sample, "ab", True)).backward()  # type: ignore[union-attr]
        return [of(model)]
    hs.parallelize(model, grid)
    inputs = hs.shard(x, grid).clone().requires_grad_()
    losses = [y.square().mean() for y in model(inputs, "ab", True)]
    for loss in losses if grid.rank else reversed(losses):
        loss.backward()
    return [of(model)]


def test_replicas_whose_passes_come_in_another_order() -> None:
    (expected,) = run_ranks(1, in_two_losses, True)[0]
    for (found,) in run_ranks(2, in_two_losses, False):
        for g, w in zip(found, expected, strict=True):
            assert (g is None) == (w is None)
            assert g is None or w is None or (g - w).norm() <= 1e-11


def gradient_of_nested_checkpoints(grid: hs.Grid | None) -> torch.Tensor:
    torch.manual_seed(0)
    first, last = nn.Conv3d(1, 4, 3), nn.Conv3d(4, 2, 3)
    x: Any = torch.randn(2, 1, 8, 8, 6)
    if grid is not None:
        x = hs.shard(x, grid)

    def inner(y: Any) -> Any:
        return torch.relu(torch.tanh(y))

    def outer(x: Any) -> Any:
        return last(checkpoint(inner, first(x), use_reentrant=False))

    checkpoint(outer, x, use_reentrant=False).sin().sum().backward()
    assert first.weight.grad is not None
    return first.weight.grad


def test_a_checkpoint_within_a_checkpoint() -> None:
    found, wanted = gradient_of_nested_checkpoints(hs.Grid()), gradient_of_nested_checkpoints(None)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
