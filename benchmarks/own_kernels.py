"""The library's own kernels for a block's convolution, beside torch's in `block_kernels`.

A limit of torch's kernels says what the step reaches of what there was without the library; one
that counts these, too, says what is left to gain.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from block_kernels import BlockConvolution, Kernel, Operands

from hyperslab.kernels.compile import direct_is_known
from hyperslab.kernels.conv_problem import ConvOptions, problem_for
from hyperslab.kernels.conv_variants import (
    fits_depthwise,
    fits_winograd,
    weight_by_channel,
    weight_by_samples,
    weight_by_winograd,
    windows_are_small,
)

OWN = "hyperslab"
FEW_CHANNELS = 32


def is_own(name: str) -> bool:
    """Whether a kernel of this name is one of these."""
    return name.startswith(OWN)


def own_kernels(
    block: BlockConvolution, which: str, given: Operands
) -> Iterator[tuple[str, Kernel]]:
    """All that do ``which`` pass, by name."""
    if which == "weight gradient" and not block.transposed:
        yield from _of_the_weight(block, given)
    if not _fits(block):
        return
    lying = given.lying(torch.channels_last_3d)
    direct = torch.ops.hyperslab.direct_convolution
    padding = list(block.padding)
    kernel = list(block.weight[2:])
    reach = [k - 1 - p for k, p in zip(kernel, padding, strict=True)]
    passes = {
        "forward": lambda: direct(lying.x, given.weight, given.bias, padding, False),
        "input gradient": lambda: direct(lying.g, given.weight, None, reach, True),
        "weight gradient": lambda: torch.ops.hyperslab.direct_convolution_gradient(
            lying.x, lying.g, kernel, padding, block.bias
        ),
    }
    yield f"{OWN} cl", passes[which]


def _of_the_weight(block: BlockConvolution, given: Operands) -> Iterator[tuple[str, Kernel]]:
    options = ConvOptions(block.stride, block.padding, block.dilation, block.groups)
    problem = problem_for("weight", block.x, block.weight, block.dtype, options)
    lying = given.lying(torch.channels_last_3d)
    operands = lying.x, lying.g, given.weight, block.bias, problem
    if windows_are_small(problem):
        yield f"{OWN} im2col cl", lambda: weight_by_samples(*operands)
    if fits_winograd(problem):
        yield f"{OWN} Winograd cl", lambda: weight_by_winograd(*operands)
    if fits_depthwise(problem):
        yield f"{OWN} depthwise cl", lambda: weight_by_channel(*operands)


def _fits(block: BlockConvolution) -> bool:
    return (
        block.dtype == torch.bfloat16
        and not block.transposed
        and block.groups == 1
        and {*block.stride, *block.dilation} == {1}
        and max(block.x[1], block.out_channels) <= FEW_CHANNELS
        and all(p < k for p, k in zip(block.padding, block.weight[2:], strict=True))
        and direct_is_known()
    )
