"""Cut tensors in all their states equal plain torch's (tier: a few gloo ranks).

A program is a sequence of operators that are put off, views, changes in place and reads, which
hypothesis draws; it runs on cut tensors and on whole ones side by side. Reads are drawn, too, so
that a tensor stays deferred, or in its own order of memory, over several steps.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.ops import fusion
from hyperslab.tensor.deferred import DeferredTensor
from tests.ops.programs.programs import whole
from tests.ops.serial import draw_examples
from tests.ranks import run_ranks
from tests.structure import parsed

Number = int
Step = tuple[str, Number, Number]
"""The name of an operator, and which tensors of the pool it takes."""

SHAPE = (2, 4, 8, 6, 4)
CLOSE = 2e-4  # of the largest element, after some layers in float32
MOST_IN_POOL = 6

Weights = dict[str, torch.Tensor]


def conv(w: Weights, x: Any) -> Any:
    return F.conv3d(x, w["filter"][:, : x.shape[1]], padding=1)


def norm(w: Weights, x: Any) -> Any:
    channels = x.shape[1]
    options = (None, None, w["scale"][:channels], w["shift"][:channels], True)
    return F.batch_norm(x, *options)


# Kept channels last, or put off, on the way to the next one.
LAYERS: dict[str, Callable[[Weights, Any], Any]] = {
    "conv": conv,
    "norm": norm,
    "instance_norm": lambda w, x: F.instance_norm(x),
    "relu": lambda w, x: F.relu(x),
    "leaky_relu": lambda w, x: F.leaky_relu(x, 0.1),
    "max_pool": lambda w, x: F.max_pool3d(x, 2, 1, padding=1),
    "tile_pool": lambda w, x: F.max_pool3d(x, 2) if min(x.shape[2:]) > 3 else x * 1,
    "avg_pool": lambda w, x: F.avg_pool3d(x, 2) if min(x.shape[2:]) > 3 else x * 1,
    "scale": lambda w, x: x * 0.5,
}
VIEWS: dict[str, Callable[[Weights, Any], Any]] = {
    "same": lambda w, x: x[:],
    "channels": lambda w, x: x[:, :2],
    "crop": lambda w, x: x[:, :, 1:],
    "far_crop": lambda w, x: x[..., x.shape[4] // 2 :],
    "edge_crop": lambda w, x: x[..., :-1] if x.shape[4] > 2 else x[:],
    "transpose": lambda w, x: x.transpose(3, 4),
    "flatten": lambda w, x: x.flatten(2).unflatten(2, x.shape[2:]),
    "detach": lambda w, x: x.detach(),
    "contiguous": lambda w, x: x.contiguous(),
    "channels_last": lambda w, x: x.contiguous(memory_format=torch.channels_last_3d),
    "to": lambda w, x: x.to(x.dtype),
    "clone": lambda w, x: x.clone(),
}
CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "mul_": lambda x, o: x.mul_(1.5),
    "relu_": lambda x, o: F.relu(x, inplace=True),
    "leaky_relu_": lambda x, o: F.leaky_relu(x, 0.2, inplace=True),
    "add_mean": lambda x, o: x.add_(o.mean()),
    "assign": lambda x, o: x.__setitem__((slice(None), slice(1, 2)), 0.5),
    "fill": lambda x, o: x.masked_fill_(x > 1, 0.5),
}
READS: dict[str, Callable[[Any], Any]] = {
    "full": whole,
    "local": lambda x: x.local if isinstance(x, hs.Sharded) else x,
    "attributes": lambda x: (x.requires_grad, x.grad_fn is None),
    "sum": lambda x: whole(x.sum()),
}
# Layers twice: only in a row are they put off together.
NAMES = [*LAYERS, *LAYERS, *VIEWS, *CHANGES, *READS]

steps = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 7), st.integers(0, 7)), min_size=6, max_size=14
)


def run_step(step: Step, w: Weights, pool: list[Any]) -> Any:
    """What a step adds to the pool or, of one that adds nothing, None."""
    name, at, other = step
    x = pool[-1 - at % len(pool)]
    if name in LAYERS or name in VIEWS:
        return (LAYERS | VIEWS)[name](w, x)
    if name in CHANGES:
        CHANGES[name](x, pool[other % len(pool)])
    else:
        READS[name](x)
    return None


def check_state(x: hs.Sharded) -> None:
    """The rules of the note on states."""
    if x.pending is None:
        return
    for source in x.pending.sources:
        assert any(reader() is x for reader in source.readers)
    assert x.private
    assert x._own is None
    assert x._computed is None


def seen_states(x: hs.Sharded) -> set[str]:
    flags = {
        "deferred": x.pending is not None,
        "source": any(reader() is not None for reader in x.readers),
        "private": x.private,
        "reordered": x.reordered,
        "copy": x.is_copy,
        "crop": x.is_crop,
        "recomputable": x._computed is not None,
    }
    return {name for name, there in flags.items() if there}


def differ(found: torch.Tensor, expected: torch.Tensor) -> bool:
    found, expected = found.detach(), expected.detach()
    if found.shape != expected.shape:
        return True
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return bool(((found - expected).abs() > CLOSE * largest).any())


def weights() -> Weights:
    generator = torch.Generator().manual_seed(1)
    return {
        "filter": torch.randn(4, 4, 3, 3, 3, generator=generator) / 6,
        "scale": torch.rand(4, generator=generator) + 0.5,
        "shift": torch.randn(4, generator=generator),
    }


def run_one(program: list[Step], grid: hs.Grid) -> tuple[list[str], set[str], int]:
    """The failures, the states that were seen, and how many steps were refused."""
    w = weights()
    value = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    leaf, serial_leaf = (value.clone().requires_grad_() for _ in range(2))
    ours: list[Any] = [hs.shard(leaf, grid) * 1]
    torchs: list[Any] = [serial_leaf * 1]
    seen: set[str] = set()
    failures: list[str] = []
    refused = 0
    for step in program:
        try:
            y = run_step(step, w, ours)
        except (hs.HyperslabError, RuntimeError) as error:
            if "whose result was not computed yet" in str(error):
                failures.append(f"{step}: a source changed before its readers were forced")
            refused += 1
            continue
        z = run_step(step, w, torchs)
        if y is not None:
            ours, torchs = [*ours, y][-MOST_IN_POOL:], [*torchs, z][-MOST_IN_POOL:]
        for x in ours:
            check_state(x)
            seen |= seen_states(x)
    total: Any = 0
    serial_total: Any = 0
    for i, (x, expected) in enumerate(zip(ours, torchs, strict=True)):
        try:
            found = x.full()
        except hs.LayoutError as error:
            if "is a copy where serial torch has a view" not in str(error):
                failures.append(f"tensor {i}: {error}")
            refused += 1
            continue
        if differ(found, expected):
            failures.append(f"tensor {i} of {len(ours)}")
        total = total + (found * (i + 1)).tanh().sum()
        serial_total = serial_total + (expected * (i + 1)).tanh().sum()
    if not getattr(serial_total, "requires_grad", False):
        return failures, seen, refused
    # Either run may find that a saved tensor was changed in place, for they save different ones:
    # where torch refuses there is no gradient to compare with, and ours may always refuse.
    try:
        serial_total.backward()
        total.backward()
    except RuntimeError:
        return failures, seen, refused + 1
    if leaf.grad is None or differ(leaf.grad, serial_leaf.grad):
        failures.append("gradient")
    return failures, seen, refused


def run_all(programs: list[list[Step]], layout: dict[str, int]) -> list[Any]:
    grid = hs.Grid(**layout)
    with patch.object(fusion, "KEPT_UP_TO", 0):  # small blocks are computed again, too
        return [run_one(program, grid) for program in programs]


LAYOUTS = [{"depth": 2}, {"width": 3}]


def test_all_states_equal_plain_torch() -> None:
    programs = draw_examples(steps, 40)
    seen: set[str] = set()
    for layout in LAYOUTS:
        results = run_ranks(torch.Size(layout.values()).numel(), run_all, programs, layout)
        for program, *of_ranks in zip(programs, *results, strict=True):
            assert all(failures == [] for failures, _, _ in of_ranks), (layout, program)
            # Ranks that went different ways would wait for each other some day.
            assert len({refused for _, _, refused in of_ranks}) == 1, (layout, program)
            seen = seen.union(*(states for _, states, _ in of_ranks))
        refused = sum(count for _, _, count in results[0])
        assert refused < 0.25 * sum(map(len, programs))
    assert seen == {"deferred", "source", "private", "reordered", "copy", "crop", "recomputable"}


def test_every_change_of_every_view_equals_plain_torch() -> None:
    """Of a result that lies channels last."""
    programs: list[list[Step]] = [
        [("conv", 0, 0), (view, 0, 0), (change, 0, 1)] for view in VIEWS for change in CHANGES
    ]
    for results in run_ranks(2, run_all, programs, LAYOUTS[0]):
        for program, (failures, _, _) in zip(programs, results, strict=True):
            assert failures == [], program


STATES = vars(DeferredTensor)["__annotations__"].keys() | {
    "private",
    "reordered",
    "is_crop",
}


def test_transitions_are_made_in_one_place() -> None:
    """No rule assigns what the diagram of the states has; its methods do."""
    root = Path(hs.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for folder in ("ops", "tensor", "parallel")
        for path in sorted((root / folder).rglob("*.py"))
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if node.attr in STATES and path.name != "deferred.py"
    ]
    assert found == []
    assert {"pending", "readers", "_own", "_computed", "_base_of_copy"} <= STATES
    assert all(hasattr(DeferredTensor, name) for name in STATES)
