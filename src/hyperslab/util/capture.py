"""Refuses, in our words, what a CUDA graph would leave out of its replays.

[Note: capture] ``torch.cuda.graph`` records the kernels that a step queues, and a replay queues
these again; nothing that the host does is repeated. In a step of a cut network the host

- draws a seed for the random numbers of a volume, which go into its kernels as a number: every
  replay would drop the same elements, without a word;
- looks now and then whether the ranks have one random state, one set of parameters and the same
  ordinary inputs, and waits for what was asked before;
- copies messages to and from its own memory where the ranks have gloo alone.

The first goes wrong silently; the others would be skipped, or fail inside CUDA with words that name
none of it. So each of these places refuses. What has none of them is not touched: the kernels of
one rank, and messages and sums over NCCL, are as capturable as torch's own.
"""

from __future__ import annotations

import torch

from hyperslab.errors import UnsupportedOp


def is_capturing() -> bool:
    """Tell whether the current stream records a CUDA graph; False where CUDA has not begun."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str, remedy: str) -> None:
    """Refuse what the host does once, at the capture, and would have to do at every replay.

    Raises:
        UnsupportedOp: the current stream records a CUDA graph.
    """
    if is_capturing():
        raise UnsupportedOp(
            f"{what} is part of a CUDA graph that is being captured; a replay would leave it out\n"
            f"    {remedy}"
        )
