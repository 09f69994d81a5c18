"""Steps of random programs: windows, resampling, joins, norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.ops.programs.programs import MOST, Draw, Run, need, op, spatial, volume
from tests.ops.recut import recut


@op
def conv(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    n, c = spatial(x), x.shape[1]
    k = [min(d.choice([1, 2, 3, 4, 5]), e + 2) for e in x.shape[2:]]
    stride = [d.choice([1, 1, 2, 3]) for _ in range(n)]
    pad = [d.randint(0, max(0, kk - 1)) for kk in k]
    need(all(e + 2 * p >= kk for e, p, kk in zip(x.shape[2:], pad, k, strict=True)))
    groups = d.choice([1, c])
    o = d.choice([1, 2, 3]) * groups if groups > 1 else d.choice([2, 3, 4])
    need(o <= 8)
    w = run.weight(d, o, c // groups, *k)
    b = run.weight(d, o) if d.random() < 0.5 else None
    return (F.conv1d, F.conv2d, F.conv3d)[n - 1](x, w, b, stride, pad, 1, groups) / 3


@op
def same_conv(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    n, c = spatial(x), x.shape[1]
    w = run.weight(d, c, c, *[3] * n)
    return (F.conv1d, F.conv2d, F.conv3d)[n - 1](
        x, w, padding="same", dilation=d.choice([1, 2])
    ) / 4


@op
def conv_transpose(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    n, c = spatial(x), x.shape[1]
    stride = [d.choice([1, 2, 3]) for _ in range(n)]
    k = [d.choice([s, s, 2, 3]) for s in stride]
    pad = [d.randint(0, (kk - 1) // 2) for kk in k]
    more = [d.randint(0, s - 1) for s in stride]
    w = run.weight(d, c, 2, *k)
    out = [
        (e - 1) * s - 2 * p + kk + m
        for e, s, p, kk, m in zip(x.shape[2:], stride, pad, k, more, strict=True)
    ]
    need(all(e > 0 for e in out))
    size = x.shape[0] * 2
    for e in out:
        size *= e
    need(size <= MOST)
    return (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1](
        x, w, None, stride, pad, more
    )


@op
def pool(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    n = spatial(x)
    k = d.choice([2, 3])
    s, p = d.choice([1, 2, 3]), d.choice([0, k // 2])
    need(all(e + 2 * p >= k for e in x.shape[2:]))
    if d.random() < 0.5:
        f = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
        return f(x, k, s, p, ceil_mode=d.random() < 0.3)
    g = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
    return g(x, k, s, p, d.random() < 0.3, d.random() < 0.5)


@op
def adaptive(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    n = spatial(x)
    out = [d.randint(1, 4) for _ in range(n)]
    kind = d.choice(["avg", "max"])
    return getattr(F, f"adaptive_{kind}_pool{n}d")(x, out)


@op
def unpool(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    need(all(e >= 2 for e in x.shape[2:]))
    n = spatial(x)
    y, i = getattr(F, f"max_pool{n}d")(x, 2, return_indices=True)
    return getattr(F, f"max_unpool{n}d")(y * 2, i, 2, output_size=x.shape[2:])


@op
def interpolate(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    n = spatial(x)
    mode = d.choice(
        ["nearest", ("linear", "bilinear", "trilinear")[n - 1], "area", "nearest-exact"]
    )
    out = [max(1, int(e * d.choice([0.5, 0.7, 1.4, 2.0]))) for e in x.shape[2:]]
    need(x.numel() * 8 <= MOST)
    corners = d.choice([True, False]) if mode.endswith("linear") else None
    return F.interpolate(x, out, mode=mode, align_corners=corners)


@op
def pad(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    n = spatial(x)
    mode = d.choice(["constant", "reflect", "replicate", "circular"])
    most = [min(2, e - 1) for e in reversed(x.shape[2:])]
    amounts = [d.randint(0, m) for m in most for _ in range(2)]
    if mode == "constant" and d.random() < 0.4:
        amounts[d.randrange(2 * n)] = -1
        need(all(e > 2 for e in x.shape[2:]))
    return F.pad(x, amounts, mode=mode)


@op
def crop(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 0)
    dim = d.randrange(x.dim())
    e = x.shape[dim]
    need(e >= 2)
    a = d.randrange(e - 1)
    b = d.randint(a + 1, e)
    where: list[Any] = [slice(None)] * x.dim()
    where[dim] = slice(a, b, d.choice([1, 1, 2]))
    return x[tuple(where)]


@op
def centre_crop(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    need(all(e >= 3 for e in x.shape[2:]))
    return x[(..., *[slice(1, -1) for _ in x.shape[2:]])]


@op
def cat(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 0 and x.numel() <= MOST // 2)
    dim = d.randrange(x.dim())
    if d.random() < 0.5:
        other = recut(x, d.randrange(1, 100)) if run.cut else x
        d.random() if not run.cut else None
        return torch.cat([x, other * 2], dim)
    fits = [
        y
        for y in run.pool
        if y.dim() == x.dim()
        and all(a == b or i == dim for i, (a, b) in enumerate(zip(y.shape, x.shape, strict=True)))
    ]
    y = d.choice(fits)
    need(x.numel() + y.numel() < MOST)
    return torch.cat([y, x], dim)


@op
def permute_and_back(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() >= 2)
    order = list(range(x.dim()))
    d.shuffle(order)
    y = x.permute(order)
    w = run.weight(d, y.shape[-1])
    y = d.choice(
        [
            lambda: y * w,
            lambda: F.layer_norm(y, y.shape[-1:], w),
            lambda: y.softmax(-1),
            lambda: y - y.mean(1, keepdim=True),
        ]
    )()
    return y.permute([order.index(i) for i in range(x.dim())])


@op
def permute(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() >= 3)
    order = list(range(x.dim()))
    tail = order[2:]
    d.shuffle(tail)
    if d.random() < 0.8:
        return x.permute([0, 1, *tail])
    a, b = d.sample(order, 2)
    return x.transpose(a, b)


@op
def flip(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 0)
    dims = d.sample(range(x.dim()), d.randint(1, min(2, x.dim())))
    if d.random() < 0.5:
        return x.flip(dims)
    return x.roll([d.randint(-3, 3) for _ in dims], dims)


@op
def norm(run: Run, d: Draw, x: Any) -> Any:
    volume(x)
    kind = d.choice(["batch", "group", "instance", "layer", "rms", "normalize"])
    c = x.shape[1]
    need(x.numel() // c > 2)
    if kind == "batch":
        return F.batch_norm(
            x,
            torch.zeros(c).double(),
            torch.ones(c).double(),
            run.weight(d, c),
            run.weight(d, c),
            True,
        )
    if kind == "group":
        return F.group_norm(x, d.choice([1, c]), run.weight(d, c), run.weight(d, c), 1e-2)
    if kind == "instance":
        need(x[0, 0].numel() > 1)
        return F.instance_norm(x, weight=run.weight(d, c), bias=run.weight(d, c), eps=1e-2)
    n = d.randint(1, spatial(x))
    if kind == "layer":
        return F.layer_norm(x, x.shape[-n:], run.weight(d, *x.shape[-n:]), None, 1e-2)
    if kind == "rms":
        return F.rms_norm(x, x.shape[-n:], run.weight(d, *x.shape[-n:]), 1e-2)
    return F.normalize(x, 2.0, d.randrange(x.dim()), 1e-2)


@op
def softmax(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 0)
    return d.choice([F.softmax, F.log_softmax])(x, d.randrange(x.dim()))


@op
def reduce_and_gate(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 1)
    dims = sorted(d.sample(range(x.dim()), d.randint(1, x.dim())))
    kind = d.choice(["mean", "sum", "amax", "std", "var", "logsumexp", "norm"])
    dims = dims[:2] if kind == "norm" else dims
    if kind in ("std", "var"):
        n = 1
        for i in dims:
            n *= x.shape[i]
        need(n > 1)
    m = getattr(torch, kind)(x, dim=dims, keepdim=True)
    gate = d.choice([lambda: m.sigmoid(), lambda: m.tanh(), lambda: m.expand_as(x).tanh()])()
    return d.choice(
        [
            lambda: x * gate,
            lambda: gate * x,
            lambda: x + gate,
            lambda: torch.where(x > gate, x, gate),
        ]
    )()


@op
def reduce(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() > 2)
    dim = d.randrange(x.dim())
    kind = d.choice(["mean", "sum", "max", "min", "prod"])
    y = getattr(x, kind)(dim)
    y = y[0] if kind in ("max", "min") else y
    return y.unsqueeze(dim) if d.random() < 0.6 else y


@op
def expand(run: Run, d: Draw, x: Any) -> Any:
    ones = [i for i, e in enumerate(x.shape) if e == 1]
    need(bool(ones) and x.numel() * 3 < MOST)
    shape = list(x.shape)
    shape[d.choice(ones)] = 3
    return x.expand(shape)


@op
def reshape(run: Run, d: Draw, x: Any) -> Any:
    need(x.dim() >= 3)
    i = d.randrange(x.dim() - 1)
    y = x.flatten(i, i + 1)
    if d.random() < 0.7:
        y = (y * 1.5).unflatten(i, (x.shape[i], x.shape[i + 1]))
    return y


@op
def split_dim(run: Run, d: Draw, x: Any) -> Any:
    even = [i for i, e in enumerate(x.shape) if e % 2 == 0 and e > 0]
    need(bool(even) and 0 < x.dim() < 6)
    i = d.choice(even)
    y = x.unflatten(i, (2, x.shape[i] // 2))
    return y.sum(i) if d.random() < 0.5 else y.flatten(i, i + 1)
