"""Fused kernels: what stands between two convolutions, in one pass over the block.

A *chain* is normalisation, activation and pooling of one tensor, each optional::

    u = (x - mean) * scale + shift   per channel (batch norm) or per sample and channel (others)
    a = activation(u)                by its slope below zero: 1 identity, 0 relu, else leaky relu
    y = mean or maximum of a         over tiles that cover the block without overlap

Importing this package registers eight operators with torch, whose schemas are in
`hyperslab.ops.kernels.fused.operators`::

    torch.ops.hyperslab.channel_sums           what the moments of x are made of
    torch.ops.hyperslab.chain_forward          y, and marks: what its gradient needs
    torch.ops.hyperslab.chain_backward_sums    sums of du and of du * (x - mean)
    torch.ops.hyperslab.chain_backward         dx
    torch.ops.hyperslab.normalisation          norm and moments, from the sums of x
    torch.ops.hyperslab.parameter_gradients    those of weight and bias, from the sums of du
    torch.ops.hyperslab.through_statistics     what else of dx the statistics make
    torch.ops.hyperslab.reorder                contiguous to channels last and back

They have no graph: call them inside a `torch.autograd.Function`. Each has its plain reference, in
the module of its name, which runs wherever there is no faster version, and a form on the meta
device, so that a step can be traced.

*Marks* are bytes in the order in which the block lies in memory: one *bit* an element of ``x``
(does the activation pass the gradient unscaled?), eight to a byte, and after the last byte one
*winner* an element of a maximum ``y``: the number, row by row, of its element in the tile. Bits are
kept only without a normalisation, which asks for ``x`` in the backward pass anyway.
"""

from hyperslab.ops.kernels.fused import on_cuda, operators

__all__ = ["on_cuda", "operators"]
