"""Random programs of views, no-ops and changes in place: every tensor of the family is compared."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import hyperslab as hs
from tests.ops.programs.programs import whole
from tests.ops.recut import recut
from tests.ops.serial import distance

Draw = random.Random


def _narrow(d: Draw, x: Any) -> Any:
    dim = d.randrange(x.dim())
    a = d.randrange(x.shape[dim])
    return x.narrow(dim, a, d.randint(1, x.shape[dim] - a))


def _strided(d: Draw, x: Any) -> Any:
    dim = d.randrange(x.dim())
    where: list[Any] = [slice(None)] * x.dim()
    where[dim] = slice(d.randrange(2), None, d.choice([1, 2]))
    y = x[tuple(where)]
    return y if y.numel() else x


def _select(d: Draw, x: Any) -> Any:
    if x.dim() < 3:
        return x[None]
    dim = d.randrange(x.dim())
    return x.select(dim, d.randrange(x.shape[dim]))


def _permute(d: Draw, x: Any) -> Any:
    order = list(range(x.dim()))
    d.shuffle(order)
    return x.permute(order)


def _merge(d: Draw, x: Any) -> Any:
    if x.dim() < 2:
        return x.unsqueeze(0)
    i = d.randrange(x.dim() - 1)
    return (
        x.flatten(i, i + 1) if d.random() < 0.5 else x.reshape(*x.shape[:i], -1, *x.shape[i + 2 :])
    )


def _split(d: Draw, x: Any) -> Any:
    even = [i for i, e in enumerate(x.shape) if e % 2 == 0]
    if not even or x.dim() > 5:
        return x[...]
    i = d.choice(even)
    return x.unflatten(i, (2, x.shape[i] // 2))


def _squeeze(d: Draw, x: Any) -> Any:
    ones = [i for i, e in enumerate(x.shape) if e == 1]
    return x.squeeze(d.choice(ones)) if ones and x.dim() > 2 else x.unsqueeze(d.randint(0, x.dim()))


def _expand(d: Draw, x: Any) -> Any:
    return x.expand(x.shape) if d.random() < 0.5 else x.expand_as(x)


VIEWS: dict[str, Callable[[Draw, Any], Any]] = {
    "narrow": _narrow,
    "strided": _strided,
    "select": _select,
    "permute": _permute,
    "merge": _merge,
    "split": _split,
    "squeeze": _squeeze,
    "expand": _expand,
    "chunk": lambda d, x: x.chunk(2, d.randrange(x.dim()))[0].detach(),
    "split_parts": lambda d, x: x.split(1, d.randrange(x.dim()))[-1].detach(),
    "unbind": lambda d, x: x.unbind(d.randrange(x.dim()))[0].detach() if x.dim() > 2 else x[:],
    "contiguous": lambda d, x: x.contiguous(),
    "same_view": lambda d, x: x.view(x.shape),
    "same_reshape": lambda d, x: x.reshape(x.shape),
    "to": lambda d, x: x.to(x.dtype),
    "double": lambda d, x: x.double(),
    "type_as": lambda d, x: x.type_as(x),
    "detach": lambda d, x: x.detach(),
    "clone": lambda d, x: x.clone(),
    "dropout": lambda d, x: F.dropout(x, 0.5, False),
    "dropout0": lambda d, x: F.dropout(x, 0.0, True),
    "pad0": lambda d, x: F.pad(x, (0, 0)),
    "roll0": lambda d, x: x.roll(0, 0),
    "flip0": lambda d, x: x.flip(0),
    "cat1": lambda d, x: torch.cat([x], 0),
    "repeat1": lambda d, x: x.repeat([1] * x.dim()),
    "tile1": lambda d, x: x.tile((1,)),
    "interleave1": lambda d, x: x.repeat_interleave(1, 0),
    "positive": lambda d, x: +x,
    "real": lambda d, x: torch.real(x),
    "atleast": lambda d, x: torch.broadcast_to(x, x.shape),
    "sum_nothing": lambda d, x: x.sum((0,), keepdim=True) if x.shape[0] == 1 else x * 1,
    "mean1": lambda d, x: x.unsqueeze(0).mean(0),
    "max1": lambda d, x: x.unsqueeze(0).amax(0),
    "softmax1": lambda d, x: x.softmax(0),
    "clamp": lambda d, x: x.clamp(min=-100.0),
    "pool1": lambda d, x: (
        F.max_pool1d(x, 1)
        if x.dim() == 3
        else F.avg_pool2d(x, 1)
        if x.dim() == 4
        else F.avg_pool3d(x, 1)
        if x.dim() == 5
        else x * 1
    ),
    "adaptive": lambda d, x: F.adaptive_avg_pool3d(x, x.shape[2:]) if x.dim() == 5 else x * 1,
    "interpolate1": lambda d, x: F.interpolate(x, x.shape[2:]) if 3 <= x.dim() <= 5 else x * 1,
    "eval_norm": lambda d, x: F.normalize(x, dim=0),
    "T": lambda d, x: x.mT if x.dim() > 1 else x[:],
    "take_all": lambda d, x: x[...],
    "new_axis": lambda d, x: x[None, ...],
    "list": lambda d, x: x[[0]],
    "where": lambda d, x: torch.where(x == x, x, 0 * x),
    "rot0": lambda d, x: x.rot90(0, (0, 1)) if x.dim() > 1 else x * 1,
    "cumsum": lambda d, x: x.unsqueeze(0).cumsum(0),
    "sort": lambda d, x: x.unsqueeze(0).sort(0)[0],
    "broadcast": lambda d, x: torch.broadcast_tensors(x, x)[0],
    "ravel": lambda d, x: x.ravel(),
    "movedim": lambda d, x: x.movedim(0, -1),
    "index_select": lambda d, x: x.index_select(0, torch.arange(x.shape[0])),
    "view_as": lambda d, x: x.view_as(x),
    "channels_last": lambda d, x: (
        x.contiguous(memory_format=torch.channels_last_3d) if x.dim() == 5 else x.contiguous()
    ),
    "glu": lambda d, x: x.requires_grad_(x.requires_grad),
}


def _assign(d: Draw, x: Any, other: Any) -> Any:
    where: list[Any] = [slice(None)] * x.dim()
    where[d.randrange(x.dim())] = slice(1, None)
    x[tuple(where)] = d.random()


CHANGES: dict[str, Callable[[Draw, Any, Any], Any]] = {
    "mul_": lambda d, x, o: x.mul_(1.5),
    "iadd": lambda d, x, o: x.__iadd__(0.25),
    "relu": lambda d, x, o: F.leaky_relu(x, 0.3, inplace=True),
    "fill": lambda d, x, o: x.masked_fill_(x > 1, 0.5),
    "assign": _assign,
    "add_other": lambda d, x, o: x.add_(o.mean()),
    "copy": lambda d, x, o: x.copy_(o.clone() * 2) if o.shape == x.shape else x.neg_(),
    "index_fill": lambda d, x, o: x.index_fill_(0, torch.tensor([0]), 0.75),
    "drop": lambda d, x, o: F.dropout(x, 1.0, True, True),
    "mask": lambda d, x, o: x.__setitem__(x > 0.7, 0.1),
}

ERRORS = (hs.HyperslabError, RuntimeError, ValueError, IndexError)


def _step(name: str, at: int, other: int, state: int, pool: list[Any]) -> Any:
    if name in CHANGES:
        CHANGES[name](random.Random(state), pool[at], pool[other])
        return None
    return VIEWS[name](random.Random(state), pool[at])


def run_aliases(seed: int, grid: hs.Grid, length: int, mode: str) -> tuple[list[str], list[str]]:
    """The log and the differences; ``mode``: grad, no_grad or inference."""
    context = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    with context[mode]():
        return _run(seed, grid, length, mode == "grad")


def _run(seed: int, grid: hs.Grid, length: int, grad: bool) -> tuple[list[str], list[str]]:
    d = random.Random(seed)
    cuts = [grid.depth, grid.height, grid.width]
    shape = [d.choice([1, 1, 2, grid.data]), d.choice([1, 1, 2])]
    shape += [n * d.choice([1, 1, 2]) + d.choice([0, 0, 1]) for n in cuts]
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
    leaves = [value.clone().requires_grad_(grad) for _ in range(2)]
    ours, torchs = [recut(hs.shard(leaves[0], grid), d.choice([0, seed + 1])) * 1], [leaves[1] * 1]
    log, failures = [f"seed {seed} {tuple(shape)} {ours[0].partition}"], []
    for _ in range(length):
        change = d.random() < 0.3
        name = d.choice(sorted(CHANGES if change else VIEWS))
        at, other = d.randrange(len(ours)), d.randrange(len(ours))
        state = d.getrandbits(32)

        step = functools.partial(_step, name, at, other, state)
        try:
            y, error = step(ours), None
        except ERRORS as e:
            y, error = None, f"{type(e).__name__}: {e}"
        if error is not None:
            log.append(f"REFUSED {name}({at}:{tuple(torchs[at].shape)}) :: {error}")
            if "view" in error and not error.startswith("LayoutError"):  # torch's own
                break
        else:
            try:
                z = step(torchs)
            except ERRORS as e:
                failures.append(f"LENIENT {name} {type(e).__name__} {str(e)[:100]}")
                break
            log.append(f"{name}({at}:{tuple(torchs[at].shape)})")
            if not change:
                ours.append(y)
                torchs.append(z)
        keep = []
        for i, (a, b) in enumerate(zip(ours, torchs, strict=True)):
            try:
                far = distance(whole(a).detach(), b.detach())
            except hs.LayoutError:
                log.append(f"DROPPED {i}")
                continue
            keep.append(i)
            if not far <= 1e-10:
                failures.append(f"tensor {i} after {name}: {far:.1e}; refused: {error}")
        if failures:
            break
        ours, torchs = [ours[i] for i in keep][-5:], [torchs[i] for i in keep][-5:]
        if not ours:
            break
    if grad and not failures and ours:
        for pool in (ours, torchs):
            total: Any = 0
            for i, t in enumerate(pool):
                total = total + (t * t * (i + 1)).sum()
            total = total.local if isinstance(total, hs.Sharded) else total
            try:
                if total.requires_grad:
                    total.backward()
            except RuntimeError as e:
                log.append(f"BACKWARD {e}")
                return log, failures
        far = distance(leaves[0].grad, leaves[1].grad)
        if not far <= 1e-10:
            failures.append(f"gradient: {far:.1e}")
    return log, failures
