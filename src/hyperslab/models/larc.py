"""Scales gradients tensor by tensor: layer-wise adaptive rate control (LARC)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hyperslab.util.torch_internals import dispatch_modes_active, foreach_multiply_

ROW_LENGTH = 1024
"""Limits how many squares are summed in the tensor's own type: exact to 1e-8 in float32."""


LEAST_NORM = 1e-15
LARGEST_NORM = 1e18
"""Norms between these have squares that float32 holds."""


def scale_by_norms(
    weights: Iterable[torch.Tensor], *, trust: float = 0.002, otherwise: float = 6.25e-5
) -> None:
    """Multiply the gradient g of every tensor w by min(trust ‖w‖₂ / ‖g‖₂, 1), in place.

    The clipping variant, as Mathuriya et al. 2018, section III-B, have it: what an optimizer is
    given is never more than the gradient, so the rate of no layer exceeds the nominal one. Each
    tensor, weights and biases alike, is a layer of its own. Where ‖w‖₂ or ‖g‖₂ is 0, a bias that
    starts at zero say, the factor is ``otherwise``. A tensor without gradient is passed over. NaN
    stays NaN.

    Order: it comes last before the optimizer's own step. So g is the gradient of the mean loss of
    the global mini-batch: averaged over replicas, summed over the parts of the samples and over the
    mini-batches that are accumulated, and after clipping by the global norm, if there is such.
    It is in the units of the loss; there is no loss scaling that would have to be undone.
    `torch.optim`'s own ``weight_decay``, which no recipe uses, is added afterwards and so not
    scaled.

    Grid: every rank holds all of every parameter and the same gradient of it, so the norms are
    taken locally, need no message, and are those of the serial run. Float32 squares are summed over
    so few numbers that nothing is lost, and the rest in float64.
    """
    held = [w for w in weights if w.grad is not None]
    gradients = [w.grad for w in held if w.grad is not None]
    if not held:
        return
    of_weights = _norms([w.detach() for w in held])
    of_gradients = _norms(gradients)
    defined = (of_weights != 0) & (of_gradients != 0)
    factors = torch.where(defined, trust * of_weights / of_gradients, otherwise).clamp(max=1.0)
    foreach_multiply_(gradients, list(factors.unbind()))


def _norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([_norm(tensor) for tensor in tensors])


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm in float64; all of it so would take as long as a step of Adam.

    Where float32 cannot hold the square of a number, far from 1, it is taken so all the same.
    """
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    small = tensor.numel() <= ROW_LENGTH
    # A mode that traces has no values by which the norm of rows could be judged.
    if small or not dense or tensor.device.type != "cpu" or dispatch_modes_active():
        return torch.linalg.vector_norm(tensor, dtype=torch.float64)
    flat = tensor.as_strided((tensor.numel(),), (1,))  # in whatever order it lies in memory
    whole = flat.numel() // ROW_LENGTH * ROW_LENGTH
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW_LENGTH), dim=1)
    norm = torch.linalg.vector_norm(torch.cat([rows, flat[whole:]]), dtype=torch.float64)
    if LEAST_NORM < norm < LARGEST_NORM:
        return norm
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)
