"""The memory format of a GPU's convolutions, tried on the CPU (tier: no process)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.kernels import conv
from hyperslab.kernels.conv_problem import ConvOptions
from hyperslab.kernels.memory_format import channels_last_by_strides, memory_format_of, strides_in
from hyperslab.kernels.registry import choose_as_if_on, conv_format

LAST = torch.channels_last_3d


class Formats:
    """Runs a network of both kinds of convolution and notes in which format they are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[torch.memory_format] = []
        own = conv.aten_convolution

        def watched(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: ConvOptions
        ) -> torch.Tensor:
            if options.output_padding is None:
                self.seen.append(memory_format_of(x))
            return own(x, weight, bias, options)

        monkeypatch.setattr(conv, "aten_convolution", watched)

    def run(self, dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv3d(2, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose3d(8, 3, 2, 2)
        ).to(dtype)
        grid = hs.Grid()
        hs.parallelize(model, grid)
        x = torch.randn(1, 2, 6, 5, 4, dtype=dtype)
        y = model(hs.shard(x, grid)).local
        y.float().square().sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("dtype", "format"), [(torch.bfloat16, LAST), (torch.float32, torch.contiguous_format)]
)
def test_half_precision_is_convolved_channels_last(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, format: torch.memory_format
) -> None:
    formats = Formats(monkeypatch)
    with choose_as_if_on("cuda"):
        found = formats.run(dtype)
    assert formats.seen == [format]
    assert found[0].is_contiguous()  # what a user sees is in serial torch's format
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(found, formats.run(dtype), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_one_channel_is_channels_last_by_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CT or MRI volume: torch asks for the strides which format cuDNN is to take."""
    strides: list[tuple[int, ...]] = []
    own = conv.aten_convolution

    def watched(x: torch.Tensor, *args: Any) -> torch.Tensor:
        strides.append(x.stride())
        return own(x, *args)

    monkeypatch.setattr(conv, "aten_convolution", watched)
    layer = nn.Conv3d(1, 1, 3, padding=1).bfloat16()
    shape = (2, 1, 4, 5, 6)
    x = torch.randn(shape).bfloat16()
    grid = hs.Grid()
    hs.parallelize(nn.Sequential(layer), grid)
    for block in (x, x.contiguous(memory_format=LAST), x.mT.contiguous().mT):
        cut = hs.shard(block.clone(), grid).requires_grad_()
        with choose_as_if_on("cuda"):
            y = layer(cut)
        layer.weight.grad = None
        y.float().square().sum().backward()
        assert cut.grad is not None
        assert layer.weight.grad is not None
        # Or DDP copies it, with a warning.
        assert layer.weight.grad.stride() == layer.weight.stride()
    assert strides == [strides_in(shape, LAST)] * 3
    assert channels_last_by_strides(x.float()).equal(x.float())


def test_the_rule() -> None:
    def cudnn_takes_last(x: torch.Tensor, weight: torch.Tensor) -> bool:
        return conv_format(x, weight, "fixed") == "cudnn channels last"

    half = torch.zeros(1, 2, 3, 3, 3, dtype=torch.float16)
    assert not cudnn_takes_last(half, half)
    with choose_as_if_on("cuda"):
        assert cudnn_takes_last(half, half)
        assert not cudnn_takes_last(half.float(), half.float())
        assert not cudnn_takes_last(half[0, 0], half[0, 0])
        assert not cudnn_takes_last(half, half.float())
