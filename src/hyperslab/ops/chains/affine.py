"""Weight and bias of a normalisation, as they were when it was called."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyperslab.ops.common.half_precision import widened


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """Weight and bias (C), of half precision as float32 with their graph; each may be None.

    ``given`` is the weight that the caller gave, and ``version`` what its memory had then. Torch
    keeps the weight for the backward pass, and so a caller may not change it before that; where it
    keeps a copy (``copied``: instance norm) he may. It never keeps the bias.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    given: torch.Tensor | None
    version: int
    copied: bool

    @staticmethod
    def of(
        weight: torch.Tensor | None, bias: torch.Tensor | None, *, copied: bool = False
    ) -> Affine:
        version = 0 if weight is None or weight.is_inference() else weight._version
        return Affine(widened(weight), widened(bias), weight, version, copied)

    @property
    def requires_grad(self) -> bool:
        """Whether one of them does."""
        return any(p is not None and p.requires_grad for p in (self.weight, self.bias))

    @property
    def changed(self) -> bool:
        """Whether the weight was changed in place since."""
        given = self.given
        return given is not None and not given.is_inference() and given._version != self.version

    def check_unchanged(self) -> None:
        """Refuse to compute a gradient where torch does.

        Raises:
            RuntimeError: the weight was changed in place since.
        """
        if self.copied or not self.changed:
            return
        assert self.given is not None
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: the weight {list(self.given.shape)} of a normalisation is at version "
            f"{self.given._version}; expected version {self.version} instead\n    change it after "
            "the backward pass"
        )
