"""Steps of random programs: shapes, changes in place, attention, losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import hyperslab as hs
from tests.ops.programs.programs import MOST, Draw, Run, need, op, spatial, volume
from tests.ops.recut import recut


@op
def squeeze(run: Run, d: Draw, x: Any) -> Any:
    if 1 in x.shape[1:] and d.random() < 0.6:
        return x.squeeze(list(x.shape).index(1, 1))
    need(x.dim() < 5)
    return x.unsqueeze(d.randint(0 if d.random() < 0.2 else 1, x.dim()))


@op
def in_place(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 0)
    y = x * 1
    dim = d.randrange(y.dim())
    a = d.randrange(y.shape[dim]) if y.shape[dim] else 0
    view = d.choice(
        [
            lambda: y.narrow(dim, a, y.shape[dim] - a),
            lambda: y.transpose(0, -1),
            lambda: y[a:] if dim == 0 else y.unsqueeze(0),
            lambda: y.flatten(max(0, y.dim() - 2)),
            lambda: y.narrow(dim, 0, 1) if y.numel() else y,
            lambda: y.detach(),
            lambda: y.contiguous(),
            lambda: y.reshape(-1, *y.shape[1:]),
        ]
    )()
    change = d.choice(["mul", "add", "relu", "fill", "set", "square"])
    if change == "mul":
        view.mul_(2)
    elif change == "add":
        view += view * 0.5
    elif change == "relu":
        F.relu(view, inplace=True)
    elif change == "fill":
        view.masked_fill_(view > 0.5, 0.25)
    elif change == "set":
        view[..., 0] = 0.5
    else:
        y.add_(1)
        return y + view.sum() * 0.1
    return y + view.mean() if d.random() < 0.5 else y


@op
def assign(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 0 and x.numel() > 0)
    y = torch.zeros_like(x)
    dim = d.randrange(x.dim())
    n = x.shape[dim]
    a, b = sorted((d.randint(0, n), d.randint(0, n)))
    where: list[Any] = [slice(None)] * x.dim()
    where[dim] = slice(a, b)
    y[tuple(where)] = x[tuple(where)] * 2
    return y + x


@op
def attention_gate(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    n, c = spatial(x), x.shape[1]
    f = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    g = f(x, run.weight(d, 1, c, *[1] * n)).sigmoid()
    return x * g


@op
def self_attention(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    c = x.shape[1]
    t = x.flatten(2)
    need(t.shape[2] <= 64)
    q = torch.einsum("bcn,cd->bdn", t, run.weight(d, c, c))
    a = (
        torch.einsum("bdn,bdm->bnm", q, t).softmax(-1)
        if d.random() < 0.5
        else torch.bmm(q.transpose(1, 2), t).softmax(-1)
    )
    return torch.einsum("bnm,bcm->bcn", a, t).reshape(x.shape)


@op
def channel_attention(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    t = x.flatten(2)
    a = torch.bmm(t, t.transpose(1, 2)).div(10).softmax(-1)
    return torch.bmm(a, t).view(x.shape)


@op
def einsum_space(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() == 5)
    which = d.choice(["bcdhw,ce->bedhw", "bcdhw,de->bcehw", "bcdhw,wh->bcdwh"])
    shape = {
        "bcdhw,ce->bedhw": (x.shape[1], 2),
        "bcdhw,de->bcehw": (x.shape[2], 3),
        "bcdhw,wh->bcdwh": (x.shape[4], x.shape[3]),
    }[which]
    return torch.einsum(which, x, run.weight(d, *shape))


@op
def matmul(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() >= 2)
    if d.random() < 0.5:
        return x @ run.weight(d, x.shape[-1], 3)
    return x @ x.transpose(-1, -2) / 5


@op
def linear(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() >= 2)
    return F.linear(x, run.weight(d, 3, x.shape[-1]), run.weight(d, 3))


@op
def chunk(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 0)
    dim = d.randrange(x.dim())
    need(x.shape[dim] >= 2)
    parts = (
        x.chunk(d.choice([2, 3]), dim)
        if d.random() < 0.5
        else x.split(d.randint(1, x.shape[dim]), dim)
    )
    parts = list(parts)
    if d.random() < 0.5:
        d.shuffle(parts)
        return torch.cat([p * (i + 1) for i, p in enumerate(parts)], dim)
    run.pool.append(parts[-1])
    return parts[0].tanh() * 2


@op
def select(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() >= 3 and x.numel() > 0)
    dim = d.randrange(x.dim())
    y = x.select(dim, d.randrange(-x.shape[dim], x.shape[dim]))
    return torch.stack([y, -y], dim) if d.random() < 0.7 else y


@op
def mask(run: Run, d: Draw, x: Any) -> Any:
    m = x > 0.3
    return d.choice(
        [
            lambda: x.masked_fill(m, -1.0),
            lambda: torch.where(m, x, x * 0.1),
            lambda: x * m,
            lambda: x.clamp(-1, 0.7),
            lambda: F.relu(x),
        ]
    )()


@op
def meet(run: Run, d: Draw, x: Any) -> Any:
    """Two tensors of the pool, of shapes that broadcast."""
    fits = []
    for y in run.pool:
        try:
            shape = torch.broadcast_shapes(tuple(x.shape), tuple(y.shape))
        except RuntimeError:
            continue
        if shape.numel() <= MOST:
            fits.append(y)
    y = d.choice(fits)
    f = d.choice(
        [
            torch.add,
            torch.mul,
            torch.maximum,
            torch.sub,
            lambda a, b: torch.lerp(a, b, 0.3),
            lambda a, b: torch.where(a > b, a, b * 2),
        ]
    )
    return f(y, x) if d.random() < 0.5 else f(x, y)


@op
def recut_it(run: Run, d: Draw, x: Any) -> Any:
    return recut(x, d.randrange(1, 1000))


@op
def gather_some(run: Run, d: Draw, x: Any) -> Any:
    axes = d.sample(["data", "depth", "height", "width"], d.randint(1, 3))
    return hs.gather(x, axes) if isinstance(x, hs.Sharded) else x


@op
def excite(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    n, c = spatial(x), x.shape[1]
    s = getattr(F, f"adaptive_avg_pool{n}d")(x, 1)
    s = F.linear(s.flatten(1), run.weight(d, 2, c)).relu()
    s = F.linear(s, run.weight(d, c, 2)).sigmoid()
    return x * s.view(x.shape[0], c, *[1] * n)


@op
def up_and_join(run: Run, d: Draw, x: Any) -> Any:
    """A level of a U-Net: down, up to the skip's extents, join."""
    volume(x)
    n, c = spatial(x), x.shape[1]
    need(all(e >= 2 for e in x.shape[2:]) and x.numel() <= MOST // 2)
    y = getattr(F, f"max_pool{n}d")(x, 2)
    y = getattr(F, f"conv_transpose{n}d")(y, run.weight(d, c, c, *[2] * n), stride=2)
    amounts = [
        v
        for a, b in zip(reversed(x.shape[2:]), reversed(y.shape[2:]), strict=True)
        for v in (0, a - b)
    ]
    return torch.cat([x, F.pad(y, amounts)], 1)


@op
def sort_or_scan(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 0)
    dim = d.randrange(x.dim())
    return d.choice(
        [lambda: x.cumsum(dim) / 3, lambda: x.sort(dim)[0], lambda: x.topk(1, dim)[0]]
    )()


@op
def repeat(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 0 and x.numel() * 2 < MOST)
    dim = d.randrange(x.dim())
    counts = [2 if i == dim else 1 for i in range(x.dim())]
    return x.repeat(counts) if d.random() < 0.5 else x.repeat_interleave(2, dim)


@op
def similarity(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 1)
    dim = d.randrange(x.dim())
    return x * F.cosine_similarity(x, x.roll(1, dim) + 1, dim).unsqueeze(dim)


@op
def loss(run: Run, d: Draw, x: Any) -> Any:
    """Deep supervision: a loss at this level joins those that are there."""
    volume(x)
    c = x.shape[1]
    kind = d.choice(["mse", "ce", "dice"])
    if kind == "mse":
        target = recut(x.detach(), d.randrange(1, 99)) if run.cut else x.detach()
        d.random() if not run.cut else None
        value = F.mse_loss(x, target * 0.5)
    elif kind == "ce":
        labels = x.detach().argmax(1) if d.random() < 0.5 else (x.detach()[:, 0] > 0).long()
        value = F.cross_entropy(x, labels.clamp(max=c - 1))
    else:
        p = x.sigmoid()
        dims = tuple(range(2, x.dim()))
        value = (
            1
            - (
                (2 * (p * p.detach()).sum(dims) + 1) / (p.sum(dims) + p.detach().sum(dims) + 1)
            ).mean()
        )
    run.pool.append(value)
    return x


@op
def where_number(run: Run, d: Draw, x: Any) -> Any:
    return x / (x.abs().max() + 1) if x.dim() > 0 else x * 2
