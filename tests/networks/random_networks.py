"""Random small networks, drawn as nested tuples and built in plain torch.

A description is ``(kind, *arguments)``; `build` makes the module. A body keeps its channels and its
extents, so that bodies can be put one after the other, around each other and side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

CHANNELS = 4
Description = tuple[Any, ...]

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm3d(CHANNELS),
    "batch plain": lambda: nn.BatchNorm3d(CHANNELS, affine=False, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm3d(CHANNELS),
    "instance affine": lambda: nn.InstanceNorm3d(CHANNELS, affine=True),
    "group": lambda: nn.GroupNorm(2, CHANNELS),
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "leaky in place": lambda: nn.LeakyReLU(0.2, inplace=True),
    "prelu": nn.PReLU,
    "elu in place": lambda: nn.ELU(inplace=True),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
}
CONVS: dict[str, Callable[[], nn.Module]] = {
    "3": lambda: nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1),
    "3 no bias": lambda: nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
    "1": lambda: nn.Conv3d(CHANNELS, CHANNELS, 1),
    "depthwise": lambda: nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
    "dilated": lambda: nn.Conv3d(CHANNELS, CHANNELS, 3, padding=2, dilation=2),
    "flat": lambda: nn.Conv3d(CHANNELS, CHANNELS, (1, 3, 3), padding=(0, 1, 1)),
    "transposed": lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, 3, padding=1),
}
DOWN: dict[str, Callable[[], nn.Module]] = {
    "max": lambda: nn.MaxPool3d(2),
    "avg": lambda: nn.AvgPool3d(2),
    "max wide": lambda: nn.MaxPool3d(3, 2, 1),
    "conv": lambda: nn.Conv3d(CHANNELS, CHANNELS, 3, 2, 1),
    "conv 2": lambda: nn.Conv3d(CHANNELS, CHANNELS, 2, 2),
}
UP: dict[str, Callable[[], nn.Module]] = {
    "transposed": lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, 2, 2),
    "transposed 3": lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, 3, 2, 1, 1),
    "nearest": lambda: nn.Upsample(scale_factor=2),
}


class Residual(nn.Module):
    """Adds its input: as a new tensor, into the body's result, or twice."""

    def __init__(self, body: nn.Module, how: str) -> None:
        super().__init__()
        self.body = body
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x.clone()  # a body may work in place
        y = self.body(x)
        if self.how == "in place":
            y = y * 1.0
            y += kept
            return y
        return y + kept if self.how == "new" else kept + y + kept * 0.5


class Joined(nn.Module):
    """Joins its input and the body's result along the channels, in either order."""

    def __init__(self, body: nn.Module, how: str) -> None:
        super().__init__()
        self.body = body
        self.how = how
        self.mix = nn.Conv3d(2 * CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x.clone()
        y = self.body(x)
        parts = [kept, y] if self.how == "first" else [y, kept]
        if self.how == "twice":
            parts = [y, y]
        return self.mix(torch.cat(parts, 1))


class Twice(nn.Module):
    """Calls one module twice."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.body(x)) * 0.5


class Reread(nn.Module):
    """Looks at a convolution's result after what follows it has run, or changes it in place."""

    def __init__(self, conv: nn.Module, after: nn.Module, how: str) -> None:
        super().__init__()
        self.conv = conv
        self.after = after
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.conv(x)
        if self.how == "mul_":
            z.mul_(0.5).add_(0.1)
            return self.after(z)
        if self.how == "view":
            first, second = z.chunk(2, 1)
            return torch.cat([first * torch.sigmoid(second), second], 1)
        if self.how == "detach":
            return self.after(z.clone()) + z.detach()
        if self.how == "no_grad":
            with torch.no_grad():
                scale = self.after(self.conv(x)).abs().mean()
            return self.after(z) / (scale + 1)
        if self.how == "input":
            y = self.after(z.clone())
            return y + x
        y = self.after(z.clone())
        return y + torch.tanh(z)


class Hooked(nn.Module):
    """Lets hooks see, or replace, what a body is given and gives."""

    def __init__(self, body: nn.Module, how: str) -> None:
        super().__init__()
        self.body = body
        self.how = how
        target = body[0] if isinstance(body, nn.Sequential) and len(body) else body
        if how == "forward":
            target.register_forward_hook(lambda module, args, y: y * 1.5)
        elif how == "look":
            self.seen: list[torch.Tensor] = []
            target.register_forward_hook(lambda module, args, y: self.seen.append(y))
        elif how == "before":
            target.register_forward_pre_hook(lambda module, args: (args[0] + 0.25,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if self.how == "look":
            y = y + 0.1 * self.seen.pop()
        elif self.how == "gradient":
            y = y * 1.0
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient * 2)
        return y


class Level(nn.Module):
    """Goes down, runs a body, comes up and joins what it has skipped, as a U-Net's levels do."""

    def __init__(self, down: nn.Module, body: nn.Module, up: nn.Module, joins: bool) -> None:
        super().__init__()
        self.down = down
        self.body = body
        self.up = up
        self.mix = nn.Conv3d(2 * CHANNELS, CHANNELS, 3, padding=1) if joins else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.body(self.down(x)))
        if self.mix is None:
            return y + x
        return F.leaky_relu(self.mix(torch.cat([y, x], 1)), 0.1)


def build(description: Description) -> nn.Module:
    """Make the module of a description; its weights are drawn from torch's generator."""
    kind, *rest = description
    leaves = {"norm": NORMS, "act": ACTIVATIONS, "conv": CONVS}
    if kind in leaves:
        return leaves[kind][rest[0]]()
    if kind == "dropout":
        return nn.Dropout3d(0.3) if rest[0] else nn.Dropout(0.3)
    if kind == "seq":
        return nn.Sequential(*[build(part) for part in rest[0]])
    if kind == "residual":
        return Residual(build(rest[0]), rest[1])
    if kind == "joined":
        return Joined(build(rest[0]), rest[1])
    if kind == "twice":
        return Twice(build(rest[0]))
    if kind == "reread":
        return Reread(build(rest[0]), build(rest[1]), rest[2])
    if kind == "hooked":
        return Hooked(build(rest[0]), rest[1])
    assert kind == "level"
    return Level(DOWN[rest[0]](), build(rest[1]), UP[rest[2]](), rest[3])


def _of(kind: str, values: Any) -> st.SearchStrategy[Description]:
    return st.tuples(st.just(kind), st.sampled_from(sorted(values)))


def bodies(depth: int = 2) -> st.SearchStrategy[Description]:
    """Draw descriptions of bodies; ``depth``: of what is nested in each other."""
    conv, act, norm = _of("conv", CONVS), _of("act", ACTIVATIONS), _of("norm", NORMS)
    dropout = st.tuples(st.just("dropout"), st.booleans())
    usual = st.one_of(
        st.tuples(conv, norm, act), st.tuples(conv, act), st.tuples(conv, norm), st.tuples(conv)
    )
    stage = usual.map(lambda parts: ("seq", parts))
    after = st.one_of(act, norm, st.tuples(norm, act).map(lambda parts: ("seq", parts)))
    views = ["mul_", "view", "detach", "no_grad", "input", "again"]
    reread = st.tuples(st.just("reread"), conv, after, st.sampled_from(views))
    if depth == 0:
        return st.one_of(stage, stage, reread, conv)
    inner = bodies(depth - 1)
    nested = st.lists(st.one_of(inner, conv, act, norm, dropout), min_size=1, max_size=4)
    return st.one_of(
        nested.map(lambda parts: ("seq", tuple(parts))),
        nested.map(lambda parts: ("seq", (("seq", tuple(parts)), ("act", "prelu")))),
        st.tuples(st.just("residual"), inner, st.sampled_from(["new", "in place", "twice"])),
        st.tuples(st.just("joined"), inner, st.sampled_from(["first", "last", "twice"])),
        st.tuples(st.just("twice"), inner),
        st.tuples(
            st.just("hooked"), inner, st.sampled_from(["forward", "look", "before", "gradient"])
        ),
        st.tuples(
            st.just("level"),
            st.sampled_from(sorted(DOWN)),
            inner,
            st.sampled_from(sorted(UP)),
            st.booleans(),
        ),
    )


def networks() -> st.SearchStrategy[Description]:
    """Draw descriptions of networks that begin with a convolution."""
    return st.lists(bodies(), min_size=1, max_size=3).map(
        lambda parts: ("seq", (("conv", "3"), *parts))
    )
