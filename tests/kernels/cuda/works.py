"""What a process with ``TRITON_INTERPRET=1`` runs: Triton tried where it works."""

from __future__ import annotations

import torch

import hyperslab  # noqa: F401 - declares the operators
from hyperslab.kernels.registry import why_triton_fails

if __name__ == "__main__":
    print(why_triton_fails(torch.device("cpu")))
