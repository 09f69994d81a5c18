"""Which convolutions a step runs, and on what block of each this rank works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from block_kernels import BlockConvolution
from networks import Step
from torch import nn
from torch.overrides import TorchFunctionMode

import hyperslab as hs
from hyperslab.planner.recorder import Layers

SPATIAL = 3


@dataclass(frozen=True)
class LayerConvolution:
    """A convolution and the submodule that calls it, by its name."""

    name: str
    block: BlockConvolution


def convolutions_of(step: Step) -> list[LayerConvolution]:
    """Those of a step in their order, from one forward pass; all ranks call this."""
    return noted(step.case.model, step.forward)


def noted(model: nn.Module, forward: Any) -> list[LayerConvolution]:
    """The convolutions that ``forward`` has ``model`` do, by module or by function."""
    layers = Layers()
    with layers.following(model), _Noting(layers) as noting:
        forward()
    return noting.found


class _Noting(TorchFunctionMode):
    """Sees the calls of convolutions as the network makes them, before any rule of ours."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers = layers
        self.found: list[LayerConvolution] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        y = function(*args, **kwargs)
        arguments = _ARGUMENTS.get(function)
        if arguments is not None:
            given = {**dict(zip(arguments, args, strict=False)), **kwargs}
            block = block_of(given, y, transposed=function is F.conv_transpose3d)
            self.found.append(LayerConvolution(self.layers.current, block))
        return y


_ARGUMENTS = {
    F.conv3d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    F.conv_transpose3d: (
        "input",
        "weight",
        "bias",
        "stride",
        "padding",
        "output_padding",
        "groups",
        "dilation",
    ),
}


def block_of(given: dict[str, Any], y: torch.Tensor, *, transposed: bool) -> BlockConvolution:
    """The plain convolution of this rank's block that makes its block of ``y``.

    Where the rule gathers the input (``y`` lies whole) the block is all of it.

    Raises:
        ValueError: no padding makes the one of the other.
    """
    x = given["input"]
    weight = given["weight"]
    result = block_shape(y)
    shape = block_shape(x) if _is_cut(y) else tuple(x.shape)
    stride = _triple(given.get("stride", 1))
    dilation = _triple(given.get("dilation", 1))
    output_padding = _triple(given.get("output_padding", 0))
    block = BlockConvolution(
        x=shape,
        weight=tuple(weight.shape),
        stride=stride,
        padding=_triple(given.get("padding", 0)) if transposed else (0, 0, 0),
        dilation=dilation,
        output_padding=output_padding,
        groups=given.get("groups", 1),
        transposed=transposed,
        bias=given.get("bias") is not None,
        dtype=_computed_in(x),
        needs_dx=x.requires_grad,
    )
    if not transposed:
        block = block.with_result(result[2:])
    if block.result() != result:
        raise ValueError(f"no plain convolution of {shape} gives the block {result}: {block}")
    return block


def block_shape(x: torch.Tensor) -> tuple[int, ...]:
    """Of what this rank holds."""
    return tuple(x.box.shape if isinstance(x, hs.Sharded) else x.shape)


def _is_cut(x: torch.Tensor) -> bool:
    return isinstance(x, hs.Sharded) and any(cut is not None for cut in x.partition.cuts)


def _computed_in(x: torch.Tensor) -> torch.dtype:
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _triple(value: Any) -> tuple[int, ...]:
    return (value,) * SPATIAL if isinstance(value, int) else tuple(value)
