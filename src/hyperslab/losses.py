"""Computes losses for segmentation in plain torch, on ordinary tensors and on cut ones alike.

The last one, `gaussian_loss`, is for networks that predict numbers and how sure they are of them.

Legend: N batch, C classes, S the spatial dims (one to three), v a voxel, c a class. Logits are
(N, C, *S), labels (N, *S) hold the class of every voxel, 0 to C - 1; p is the softmax of the
logits over the classes and g the one-hot code of the labels, here a comparison that takes a byte
for each class and voxel. A network with one output channel for two classes gets a second one by
``torch.cat((torch.zeros_like(x), x), 1)``, whose softmax is the sigmoid of ``x``.

A label outside 0 to C - 1 is an error where the cross-entropy reads it, and no class for Dice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

__all__ = [
    "dice_cross_entropy_loss",
    "dice_loss",
    "focal_loss",
    "gaussian_loss",
    "gaussian_moments",
    "gaussian_outputs",
    "generalised_dice_loss",
]


def dice_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    include_background: bool = True,
    smooth: float = 1e-5,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return one minus the soft Dice coefficient of each sample and class (Milletari et al. 2016).

    ``1 - (2 sum_v p g + smooth) / (sum_v p + sum_v g + smooth)``, where p is not squared.

    Args:
        include_background: whether class 0 counts as a class.
        smooth: keeps the loss defined [voxels]; a class that is absent and not predicted costs 0.
        reduction: ``"mean"`` or ``"sum"`` over samples and classes, or ``"none"``: (N, C).

    Raises:
        ValueError: the shapes do not fit, or the reduction is unknown.
    """
    overlap, predicted, true = _overlap(logits, labels, include_background)
    loss = 1 - (2 * overlap + smooth) / (predicted + true + smooth)
    return _reduce(loss, reduction)


def generalised_dice_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    include_background: bool = True,
    smooth: float = 1e-5,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return one minus the Dice coefficient of all classes together, the small ones weighted up.

    ``1 - (2 sum_c w_c sum_v p g + smooth) / (sum_c w_c sum_v (p + g) + smooth)`` for each sample,
    with ``w_c`` proportional to ``1 / (sum_v g)^2`` (Sudre et al. 2017). The largest
    weight is 1, so that ``smooth`` is small beside the sums; an absent class has it as well.

    Args:
        include_background: whether class 0 counts as a class.
        smooth: keeps the loss defined [voxels].
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``: (N,).

    Raises:
        ValueError: the shapes do not fit, or the reduction is unknown.
    """
    overlap, predicted, true = _overlap(logits, labels, include_background)
    present = true > 0
    smallest = torch.where(present, true, torch.inf).amin(1, keepdim=True)
    weight = torch.where(present, (smallest / true).square(), 1.0)
    union = (weight * (predicted + true)).sum(1)
    loss = 1 - (2 * (weight * overlap).sum(1) + smooth) / (union + smooth)
    return _reduce(loss, reduction)


def focal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    gamma: float = 2.0,
    alpha: Sequence[float] | torch.Tensor | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """The cross-entropy of every voxel, times ``alpha_t (1 - p_t)^gamma`` (Lin et al. 2017).

    ``p_t`` is the probability of the voxel's true class t. One-hot codes are not needed.

    Args:
        gamma: 0 or more; a larger one gives easy voxels less weight.
        alpha: one weight for each class.
        reduction: ``"mean"`` or ``"sum"`` over all voxels, or ``"none"``: (N, *S).

    Raises:
        ValueError: the shapes do not fit, or the reduction is unknown.
        IndexError: a label is no class.
    """
    _check(logits, labels)
    logarithms = F.log_softmax(logits, 1, dtype=_wide(logits))
    labels = labels.long()
    entropy = weighted = F.nll_loss(logarithms, labels, reduction="none")
    if alpha is not None:
        weight = torch.as_tensor(alpha, dtype=entropy.dtype)
        if weight.device.type == "cpu" and entropy.device.type == "cuda":
            weight = weight.pin_memory()  # from there a copy waits for nothing
        weight = weight.to(entropy.device, non_blocking=True)
        weighted = F.nll_loss(logarithms, labels, weight, reduction="none")
    # 1 - p_t without cancellation; never 0, where the gradient of a root is infinite.
    miss = (-torch.expm1(-entropy)).clamp(min=torch.finfo(entropy.dtype).tiny)
    return _reduce(miss**gamma * weighted, reduction)


def dice_cross_entropy_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    include_background: bool = True,
    smooth: float = 1e-5,
) -> torch.Tensor:
    """`dice_loss` plus the mean cross-entropy, as segmentation networks are often trained.

    Args:
        weight: one weight for each class (C,), for the cross-entropy.
        include_background: whether class 0 counts as a class for Dice.
        smooth: of Dice [voxels].

    Raises:
        ValueError: the shapes do not fit.
        IndexError: a label is no class.
    """
    dice = dice_loss(logits, labels, include_background=include_background, smooth=smooth)
    return dice + F.cross_entropy(logits, labels.long(), weight)


LARGEST_LOG = 10.0
"""Bounds the logarithms in a precision's factor, so that no exponential of theirs overflows."""


def gaussian_outputs(parameters: int) -> int:
    """Return how many numbers a network predicts for a Gaussian of P parameters: P (P + 3) / 2."""
    return parameters * (parameters + 3) // 2


def gaussian_loss(
    prediction: torch.Tensor, target: torch.Tensor, *, reduction: str = "mean"
) -> torch.Tensor:
    """Return the negative log likelihood of targets under a predicted multivariate normal.

    A prediction holds, for P parameters: P means; P numbers a, of which ``10 tanh(a / 10)`` are the
    logarithms of d; and P (P - 1) / 2 numbers below the diagonal of a matrix U whose diagonal is 1,
    column by column. The precision (the inverse of the covariance) is L L^T with L = U diag(d), its
    Cholesky factor. Where all are zero the covariance is the identity.

    Args:
        prediction: (N, P (P + 3) / 2); float32 at least is computed with.
        target: (N, P).
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``: (N,).

    Raises:
        ValueError: the shapes do not fit, or the reduction is unknown.
    """
    samples, count = target.shape if target.dim() == 2 else (0, 0)
    wanted = (samples, gaussian_outputs(count))
    if not count or tuple(prediction.shape) != wanted:
        raise ValueError(
            f"a Gaussian of targets {tuple(target.shape)} takes predictions {wanted}, not "
            f"{tuple(prediction.shape)}; recipes and hs.fit say loss: gaussian"
        )
    prediction = prediction.to(_wide(prediction))
    off = target - prediction[:, :count]
    logarithms = _logarithms(prediction, count)
    columns = [off[:, i] for i in range(count)]
    first = 2 * count
    for column in range(count - 1):
        last = first + count - 1 - column
        below = (prediction[:, first:last] * off[:, column + 1 :]).sum(1)
        columns[column] = columns[column] + below
        first = last
    squares = (torch.stack(columns, 1) * logarithms.exp()).square().sum(1)
    loss = squares / 2 - logarithms.sum(1) + count / 2 * math.log(2 * math.pi)
    return _reduce(loss, reduction)


def gaussian_moments(prediction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means (N, P) and covariances (N, P, P) of what `gaussian_loss` takes.

    ``prediction`` is an ordinary tensor (N, P (P + 3) / 2); float64 is exact where parameters are
    nearly degenerate.
    """
    count = (math.isqrt(9 + 8 * prediction.shape[1]) - 3) // 2
    prediction = prediction.to(_wide(prediction))
    diagonal = _logarithms(prediction, count).exp()
    unit = torch.eye(count, dtype=prediction.dtype, device=prediction.device)
    unit = unit.repeat(len(prediction), 1, 1)
    rows, columns = torch.triu_indices(count, count, 1)  # of the transposed: column by column
    unit[:, columns, rows] = prediction[:, 2 * count :]
    covariance = torch.cholesky_inverse(unit * diagonal.unsqueeze(1))
    return prediction[:, :count], covariance


def _logarithms(prediction: torch.Tensor, count: int) -> torch.Tensor:
    return LARGEST_LOG * torch.tanh(prediction[:, count : 2 * count] / LARGEST_LOG)


def _check(logits: torch.Tensor, labels: torch.Tensor) -> None:
    shape = tuple(logits.shape)
    own = tuple(labels.shape)
    if len(shape) < 3 or shape[1] < 2 or own != (shape[0], *shape[2:]):
        raise ValueError(
            f"logits {shape} and labels {own}: expected (N, C, ...) with two or more classes, and "
            "(N, ...)\n    a channel dim of the labels is dropped by labels.squeeze(1); for one "
            "output channel see hyperslab.losses"
        )


def _wide(logits: torch.Tensor) -> torch.dtype:
    """Sums over millions of voxels need float32 at least."""
    return torch.promote_types(logits.dtype, torch.float32)


def _overlap(
    logits: torch.Tensor, labels: torch.Tensor, include_background: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over the voxels of p g, of p and of g, each (N, C), or (N, C - 1) without class 0."""
    _check(logits, labels)
    p = F.softmax(logits, 1, dtype=_wide(logits))
    classes = torch.arange(p.shape[1], dtype=labels.dtype, device=labels.device)
    g = labels.unsqueeze(1) == classes.view(-1, *[1] * (labels.dim() - 1))
    space = tuple(range(2, p.dim()))
    # `where`, because the product would keep g as numbers for the backward pass.
    sums = torch.where(g, p, 0.0).sum(space), p.sum(space), g.sum(space).to(p.dtype)
    if include_background:
        return sums
    overlap, predicted, true = (each[:, 1:] for each in sums)
    return overlap, predicted, true


def _reduce(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction: none, mean or sum")
    return loss.mean() if reduction == "mean" else loss.sum()
