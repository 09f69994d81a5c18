"""Random networks in every mode of memory equal plain torch (tier: a few gloo ranks)."""

from __future__ import annotations

import pytest
import torch

import hyperslab as hs
from hyperslab.parallel.parallelize import Memory
from tests.networks.random_networks import CHANNELS, Description, build, networks
from tests.ops.serial import draw_examples
from tests.ops.slabs.test_stages import slabs_of
from tests.ranks import run_ranks
from tests.selection import in_gate

MODES: tuple[Memory, ...] = ("none", "tile", "recompute", "offload")
SHAPE = (2, CHANNELS, 8, 6, 4)
TOGETHER = 20  # networks in one call
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2}
"""In float32 against plain torch in float64: values near a kink may fall on its other side."""

REFUSED_BY_TORCH = ("modified by an inplace operation", "must match", "Sizes of tensors")
"""Networks that change what autograd needs, or halve an odd extent and join it with itself."""

Found = dict[str, torch.Tensor]


def step(
    description: Description,
    dtype: torch.dtype,
    axes: dict[str, int] | None,
    memory: Memory,
) -> Found:
    """Two steps of training and one validation; without axes of plain torch alone."""
    torch.manual_seed(1)
    model = build(description).double()
    given = torch.randn(2, *SHAPE, dtype=torch.float64)
    weights = torch.randn(SHAPE, dtype=torch.float64)
    model, given, weights = model.to(dtype), given.to(dtype), weights.to(dtype)
    grid = None if axes is None else hs.Grid(**axes)
    if grid is not None:
        hs.parallelize(model, grid, memory=memory)
    found: Found = {}
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with slabs_of(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hyperslab.parallel.offload.OFFLOADED_FROM", 1)
        for count, x in enumerate(given):
            x.requires_grad_()
            y = model(x if grid is None else hs.shard(x, grid))
            loss = (y * (weights if grid is None else hs.shard(weights, grid))).sum()
            loss.backward()
            found[f"loss {count}"] = loss.detach().reshape(1)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[f"gradient {count} of {name}"] = parameter.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        for name, buffer in model.named_buffers():
            found[f"buffer {name}"] = buffer.double()
        model.eval()
        with torch.no_grad():
            y = model(given[0] if grid is None else hs.shard(given[0], grid))
            found["validation"] = y.full() if isinstance(y, hs.Sharded) else y
    return found


def differences(found: Found, expected: Found, tolerance: float) -> list[str]:
    """Name what is too far apart; a gradient may be small beside all gradients of its step."""
    if found.keys() != expected.keys():
        return [f"{sorted(found.keys() ^ expected.keys())} are on one side only"]
    totals = {
        count: torch.stack([v.norm() for k, v in expected.items() if k.startswith(count)]).norm()
        for count in ("gradient 0", "gradient 1")
    }
    floor = 1e-4 if tolerance < 1e-4 else 1e-1
    words = []
    for name, value in expected.items():
        size = value.norm().item()
        if name.startswith("gradient"):
            size = max(size, floor * totals[name[:10]].item())
        elif name.startswith("loss"):
            size = max(size, 1.0)
        apart = (found[name].double() - value.double()).norm().item()
        if not apart <= tolerance * max(size, 1e-6):
            words.append(f"{name}: {apart / max(size, 1e-6):.2e}")
    return words


def compare(
    descriptions: list[tuple[Description, tuple[Memory, ...]]],
    dtype: torch.dtype,
    axes: dict[str, int],
) -> list[str]:
    """Run each network in its modes, and say what was wrong or refused without a remedy."""
    wrong: list[str] = []
    for description, modes in descriptions:
        # Which elements drop out depends on the place in the volume, not on torch's generator.
        drops = "dropout" in repr(description)
        reference = (dtype, axes) if drops else (torch.float64, None)
        try:
            expected = step(description, *reference, "none")
        except RuntimeError as error:
            if not any(words in str(error) for words in REFUSED_BY_TORCH):
                raise
            continue
        for memory in modes[1:] if drops else modes:
            at = f"{memory} {description}"
            try:
                found = step(description, dtype, axes, memory)
            except (RuntimeError, hs.LayoutError, hs.UnsupportedOp) as error:
                wrong.append(f"{at}\n  refused: {error}")
                continue
            wrong += [f"{at}\n  {w}" for w in differences(found, expected, TOLERANCE[dtype])[:3]]
    return wrong


DTYPES = {"float32": torch.float32, "float64": torch.float64}
CASES = [(ranks, name) for ranks in (1, 2, 4) for name in DTYPES]
AXES: dict[int, dict[str, int]] = {1: {}, 2: {"depth": 2}, 4: {"depth": 2, "height": 2}}


@pytest.mark.parametrize(("ranks", "dtype"), in_gate(CASES, kept=[(2, "float32"), (1, "float64")]))
def test_networks_in_every_mode(ranks: int, dtype: str) -> None:
    """Without slabs, and over slabs in one mode after the other; in the long run in all."""
    drawn = draw_examples(networks(), 8)
    in_turn = [(one, (MODES[0], MODES[1 + place % 3])) for place, one in enumerate(drawn)]
    check(in_turn, ranks, dtype)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "dtype"), CASES)
def test_many_networks_in_every_mode(ranks: int, dtype: str) -> None:
    check([(one, MODES) for one in draw_examples(networks(), 300)], ranks, dtype)


def check(
    descriptions: list[tuple[Description, tuple[Memory, ...]]], ranks: int, dtype: str
) -> None:
    wrong: set[str] = set()
    for first in range(0, len(descriptions), TOGETHER):
        some = descriptions[first : first + TOGETHER]
        found = run_ranks(ranks, compare, some, DTYPES[dtype], AXES[ranks])
        wrong.update(word for words in found for word in words)
    assert not wrong, "\n".join(sorted(wrong))
