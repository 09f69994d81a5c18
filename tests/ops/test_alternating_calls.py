"""Calls that differ in one thing are not taken for each other (tier: one process, two ranks).

What a call decides is decided once for each kind of call. Here kinds take turns on one grid, after
each of them has run alone, on a grid of its own that has decided nothing yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.kernels import conv, registry, reorder
from hyperslab.kernels.registry import force
from hyperslab.tensor import Sharded
from hyperslab.tensor.sharded import Policy
from tests.kernels.test_forced import nodes
from tests.ranks import run_ranks

Result = list[object]
Kind = Callable[[hs.Grid], Result]

LAST = torch.channels_last_3d
SHAPE = (2, 4, 8, 6, 6)
BY_RULE = Policy(kernels="fixed")


def run(
    grid: hs.Grid,
    operator: Callable[..., Any],
    *,
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.float32,
    last: bool = False,
    operands: Mapping[str, torch.Tensor] | None = None,
    trained: bool = True,
    graph: bool = True,
    twice: bool = False,
    autocast: torch.dtype | None = None,
    policy: Policy = BY_RULE,
    forced: Mapping[str, str] | None = None,
    onednn: bool = True,
    **options: Any,
) -> Result:
    """Results and gradients of one call, with what can be seen of how they were made."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    x = x.contiguous(memory_format=LAST) if last else x
    cut = hs.shard(x, grid)
    block = cut.local.detach().clone().requires_grad_(graph)
    given = {name: t.clone() for name, t in (operands or {}).items()}
    for parameter in given.values():
        parameter.requires_grad_(trained and graph and parameter.is_floating_point())
    with ExitStack() as stack:
        stack.enter_context(force(forced or {}))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=onednn))
        stack.enter_context(torch.autocast("cpu", autocast, enabled=autocast is not None))
        stack.enter_context(torch.set_grad_enabled(graph))
        found = operator(Sharded.from_local(block, cut.partition, grid, policy), **given, **options)
        results = [y.local for y in (found if isinstance(found, tuple) else (found,))]
        y = results[0]
        facts: Result = [(y.dtype, y.stride(), sorted(nodes(y)))]
        if not graph:
            return [*results, *given.values(), *facts]
        leaves = [block, *(p for p in given.values() if p.requires_grad)]
        gradients = torch.autograd.grad(y, leaves, y.detach(), create_graph=twice)
        facts.append([(g.dtype, g.stride()) for g in gradients])
        return [*(r.detach() for r in (*results, *gradients)), *facts]


def parameters(
    shape: tuple[int, ...], bias: int | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {"weight": torch.randn(shape, generator=generator).to(dtype) / 4}
    if bias is not None:
        made["bias"] = torch.randn(bias, generator=generator).to(dtype)
    return made


def in_format(operands: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**operands, "weight": operands["weight"].contiguous(memory_format=LAST)}


def activated(x: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
    return F.relu(F.conv3d(x, *given, **options))


def kinds_of_convolution() -> dict[str, Kind]:
    cube = (5, 4, 3, 3, 3)
    half = torch.bfloat16
    given = parameters(cube, 5)
    base = partial(run, operator=F.conv3d, padding=1)
    return {
        "base": partial(base, operands=given),
        "batch": partial(base, operands=given, shape=(1, *SHAPE[1:])),
        "extent": partial(base, operands=given, shape=(2, 4, 8, 6, 7)),
        "float64": partial(base, operands=parameters(cube, 5, torch.float64), dtype=torch.float64),
        "bfloat16": partial(base, operands=parameters(cube, 5, half), dtype=half),
        "channels last": partial(base, operands=given, last=True),
        "weight last": partial(base, operands=in_format(given)),
        "no bias": partial(base, operands=parameters(cube)),
        "stride": partial(base, operands=given, stride=2),
        "padding": partial(base, operands=given, padding=0),
        "same": partial(base, operands=given, padding="same"),
        "dilation": partial(base, operands=given, dilation=2),
        "groups": partial(base, operands=parameters((4, 2, 3, 3, 3), 4), groups=2),
        "one voxel": partial(base, operands=parameters((5, 4, 1, 1, 1), 5)),
        "autocast": partial(base, operands=given, autocast=half),
        "autocast float16": partial(base, operands=given, autocast=torch.float16),
        "autocast of bfloat16": partial(base, operands=given, dtype=half, autocast=half),
        "autocast of filters": partial(base, operands=parameters(cube, 5, half), autocast=half),
        "autocast, weight last": partial(base, operands=in_format(given), autocast=half),
        "autocast, without graph": partial(base, operands=given, autocast=half, graph=False),
        "autocast, frozen": partial(base, operands=given, autocast=half, trained=False),
        "autocast, create_graph": partial(base, operands=given, autocast=half, twice=True),
        "autocast, torch": partial(
            base, operands=given, autocast=half, policy=Policy(kernels="torch")
        ),
        "autocast, no oneDNN": partial(base, operands=given, autocast=half, onednn=False),
        "autocast, forced": partial(base, operands=given, autocast=half, forced={"conv": "torch"}),
        "without graph": partial(base, operands=given, graph=False),
        "frozen": partial(base, operands=given, trained=False),
        "create_graph": partial(base, operands=given, twice=True),
        "torch": partial(base, operands=given, policy=Policy(kernels="torch")),
        "activation": partial(base, operator=activated, operands=given),
        "slabs": partial(
            base, operator=activated, operands=given, policy=Policy(kernels="fixed", slab=1)
        ),
        "no oneDNN": partial(base, operands=given, onednn=False),
        "forced": partial(base, operands=given, forced={"conv": "torch"}),
        "forced pass": partial(base, operands=given, forced={"conv forward": "contiguous"}),
        "transposed": partial(
            run, operator=F.conv_transpose3d, operands=parameters((4, 5, 3, 3, 3), 5), padding=1
        ),
        "output padding": partial(
            run,
            operator=F.conv_transpose3d,
            operands=parameters((4, 5, 3, 3, 3), 5),
            padding=1,
            stride=2,
            output_padding=1,
        ),
    }


def kinds_of_pooling() -> dict[str, Kind]:
    def pool(operator: Callable[..., Any], **given: Any) -> Kind:
        return partial(run, operator=operator, **given)

    found: dict[str, Kind] = {}
    for name, operator in (("max", F.max_pool3d), ("average", F.avg_pool3d)):
        base = partial(pool, operator, kernel_size=3, stride=2, padding=1)
        found |= {
            name: base(),
            f"{name}, kernel": base(kernel_size=(2, 3, 3)),
            f"{name}, stride": base(stride=1),
            f"{name}, padding": base(padding=0),
            f"{name}, ceil": base(ceil_mode=True),
            f"{name}, tiles": base(kernel_size=2, padding=0),
            f"{name}, tiles in lists": base(kernel_size=[2, 2, 2], stride=[], padding=[0, 0, 0]),
            f"{name}, extent": base(shape=(2, 4, 8, 6, 7)),
            f"{name}, channels last": base(last=True),
            f"{name}, bfloat16": base(kernel_size=2, padding=0, dtype=torch.bfloat16),
            f"{name}, float64": base(dtype=torch.float64),
            f"{name}, autocast": base(dtype=torch.bfloat16, autocast=torch.bfloat16),
            f"{name}, without graph": base(graph=False),
            f"{name}, create_graph": base(twice=True),
            f"{name}, forced": base(forced={"max_pool": "torch", "avg_pool": "torch"}),
        }
    with_index = partial(pool, F.max_pool3d, kernel_size=3, stride=2, padding=1)
    inside = partial(pool, F.avg_pool3d, kernel_size=3, stride=2, padding=1)
    return found | {
        "dilation": with_index(dilation=2),
        "indices": with_index(return_indices=True),
        "no padding counts": inside(count_include_pad=False),
        "divisor": inside(divisor_override=5),
    }


def kinds_of_normalisation() -> dict[str, Kind]:
    wide = (2, 4, 8, 6, 10)
    half = torch.bfloat16
    affine = parameters((4,), 4)
    running = {"running_mean": torch.zeros(4), "running_var": torch.ones(4)}

    def batch_norm(x: Any, **given: Any) -> Any:
        for name in ("running_mean", "running_var"):
            if name in given:
                given[name] = given[name].detach()
        return F.batch_norm(
            x, given.pop("running_mean", None), given.pop("running_var", None), **given
        )

    batch = partial(run, operator=batch_norm, shape=wide, training=True)
    group = partial(run, operator=F.group_norm, shape=wide, num_groups=2, operands=affine)
    instance = partial(run, operator=F.instance_norm, shape=wide, operands=affine)
    return {
        "batch": partial(batch, operands=affine),
        "batch, running": partial(batch, operands=affine | running, graph=False),
        "batch, momentum": partial(batch, operands=affine | running, graph=False, momentum=0.5),
        "batch, evaluated": partial(batch, operands=affine | running, graph=False, training=False),
        "batch, eps": partial(batch, operands=affine, eps=0.1),
        "batch, not affine": batch,
        "batch, bfloat16": partial(batch, operands=affine, dtype=half),
        "batch, parameters in bfloat16": partial(
            batch, operands=parameters((4,), 4, half), dtype=half
        ),
        "batch, extent": partial(batch, operands=affine, shape=(2, 4, 8, 6, 9)),
        "batch, channels last": partial(batch, operands=affine, last=True),
        "batch, replica": partial(batch, operands=affine, policy=Policy("replica")),
        "batch, create_graph": partial(batch, operands=affine, twice=True),
        "group": group,
        "group, more": partial(group, num_groups=4),
        "group, batch": partial(group, shape=(1, *wide[1:])),
        "group, autocast": partial(group, dtype=half, autocast=half),
        "instance": instance,
        "instance, batch": partial(instance, shape=(1, *wide[1:])),
        "instance, autocast": partial(instance, dtype=half, autocast=half),
        "instance, not affine": partial(instance, operands={}),
    }


KINDS = {
    "convolution": kinds_of_convolution,
    "pooling": kinds_of_pooling,
    "normalisation": kinds_of_normalisation,
}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a == b


def forget() -> None:
    """Forgets what is kept for all grids."""
    for kept in (conv._known_problem, registry._format_by_rule, reorder._plan):
        kept.cache_clear()


def taken_for_others(axes: dict[str, int], family: str) -> list[str]:
    """Names the kinds that do another thing after other kinds than alone."""
    kinds = KINDS[family]()
    alone = {}
    for name, kind in kinds.items():
        forget()
        alone[name] = kind(hs.Grid(**axes))
    forget()
    grid = hs.Grid(**axes)
    found = []
    for (_, first), (name, kind) in itertools.pairwise([*kinds.items(), *reversed(kinds.items())]):
        first(grid)
        results = kind(grid)
        if not all(map(same, results, alone[name])) or len(results) != len(alone[name]):
            found.append(name)
    return found


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("axes", [{}, {"depth": 2}])
def test_kinds_of_calls_take_turns(axes: dict[str, int], family: str) -> None:
    for found in run_ranks(2 if axes else 1, taken_for_others, axes, family):
        assert not found
