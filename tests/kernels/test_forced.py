"""Each implementation of an operator that the registry chooses, forced, is torch's (tier: one
process)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.kernels.compile import library
from hyperslab.kernels.registry import RULES, force

TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conv": lambda x: F.conv3d(x, WEIGHT, padding=1),
    "max_pool": lambda x: F.max_pool3d(x, (3, 2, 3), (2, 2, 1), (1, 0, 1)),
    "avg_pool": lambda x: F.avg_pool3d(x, 3, 2, 1),  # of tiles an epilogue would
    "interpolate": lambda x: F.interpolate(x, (5, 9, 12), mode="trilinear"),
}
ELSEWHERE = {
    "conv forward": "conv/test_variants.py",
    "conv input": "conv/test_variants.py",
    "conv weight": "conv/test_variants.py",
}
WEIGHT = torch.randn(4, 3, 3, 3, 3, generator=torch.Generator().manual_seed(1)) / 9
SHAPE = (2, 3, 8, 6, 10)
FORCED = [(name, case.implementation) for name in TORCH for case in RULES[name]]


def test_every_operator_is_tried() -> None:
    assert {*TORCH, *ELSEWHERE} == {*RULES}


def nodes(y: torch.Tensor) -> Iterator[str]:
    """The functions that made it."""
    waiting = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node.name()
            waiting += [parent for parent, _ in node.next_functions]


def block_for() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator)


def forced(operator: str, implementation: str, x: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradient through a cut tensor."""
    leaf = x.clone().requires_grad_()
    with force({operator: implementation}):
        y = TORCH[operator](hs.shard(leaf, hs.Grid())).full()
        (dx,) = torch.autograd.grad(y, leaf, y.detach(), retain_graph=True)
    return [y, dx]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("operator", "implementation"), FORCED)
def test_forced(operator: str, implementation: str, channels_last: bool) -> None:
    x = block_for()
    x = x.contiguous(memory_format=torch.channels_last_3d) if channels_last else x
    found = forced(operator, implementation, x)
    leaf = x.double().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.WEIGHT", WEIGHT.double())
        expected = TORCH[operator](leaf)
    (gradient,) = torch.autograd.grad(expected, leaf, found[0].detach().double())
    for got, want in zip(found, (expected, gradient), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(library() is None, reason="no compiler: torch's own run")
@pytest.mark.parametrize("operator", ["max_pool", "avg_pool", "interpolate"])
def test_what_is_forced_runs(operator: str) -> None:
    """Each leaves functions of its own in the graph."""
    x = block_for()
    made = [{*nodes(forced(operator, case.implementation, x)[0])} for case in RULES[operator]]
    own, torchs = made
    assert own != torchs
    assert any("Pool" in name for name in torchs) or operator == "interpolate"
