"""The segmentation losses are their formulas, and a public library's (tier: no process)."""

from __future__ import annotations

from typing import Any

import monai.losses
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs


def sample(shape: tuple[int, ...], *, absent: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in float64 and labels; the second sample may lack the last class."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
    labels = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    if absent:
        labels[1] %= shape[1] - 1
    return logits.requires_grad_(), labels


def numbers(logits: torch.Tensor, labels: torch.Tensor) -> tuple[Any, Any]:
    """Probabilities and one-hot codes (N, C, voxels) in numpy."""
    n, c = logits.shape[:2]
    z = logits.detach().numpy().reshape(n, c, -1)
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True), np.eye(c)[labels.numpy().reshape(n, -1)].transpose(0, 2, 1)


SHAPES = [(2, 3, 5, 4, 3), (2, 2, 7, 5), (3, 4, 9)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("background", [True, False])
def test_dice(shape: tuple[int, ...], background: bool) -> None:
    logits, labels = sample(shape, absent=True)
    p, g = (each[:, 0 if background else 1 :] for each in numbers(logits, labels))
    expected = 1 - (2 * (p * g).sum(2) + 0.1) / ((p + g).sum(2) + 0.1)
    options: dict[str, Any] = {"include_background": background, "smooth": 0.1}
    each = hs.losses.dice_loss(logits, labels, **options, reduction="none")
    np.testing.assert_allclose(each.detach(), expected, rtol=1e-12)
    mean = hs.losses.dice_loss(logits, labels, **options)
    np.testing.assert_allclose(mean.detach(), expected.mean(), rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("background", [True, False])
def test_generalised_dice(shape: tuple[int, ...], background: bool) -> None:
    logits, labels = sample(shape)
    p, g = (each[:, 0 if background else 1 :] for each in numbers(logits, labels))
    weight = 1 / g.sum(2) ** 2
    expected = 1 - 2 * (weight * (p * g).sum(2)).sum(1) / (weight * (p + g).sum(2)).sum(1)
    options: dict[str, Any] = {"include_background": background, "smooth": 0.0}
    each = hs.losses.generalised_dice_loss(logits, labels, **options, reduction="none")
    np.testing.assert_allclose(each.detach(), expected, rtol=1e-12)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 4, 4, 4)])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal(shape: tuple[int, ...], gamma: float) -> None:
    logits, labels = sample(shape)
    p, g = numbers(logits, labels)
    alpha = np.linspace(0.2, 1, shape[1])
    true = (p * g).sum(1)
    expected = -((alpha[:, None] * g).sum(1)) * (1 - true) ** gamma * np.log(true)
    each = hs.losses.focal_loss(logits, labels, gamma=gamma, alpha=alpha.tolist(), reduction="none")
    np.testing.assert_allclose(each.detach().flatten(1), expected, rtol=1e-11)
    total = hs.losses.focal_loss(logits, labels, gamma=gamma, reduction="sum")
    plain = -((1 - true) ** gamma * np.log(true)).sum()
    np.testing.assert_allclose(total.detach(), plain, rtol=1e-11)


def test_gamma_of_zero_is_the_cross_entropy() -> None:
    logits, labels = sample((2, 3, 5, 4, 3))
    focal = hs.losses.focal_loss(logits, labels, gamma=0.0)
    torch.testing.assert_close(focal, F.cross_entropy(logits, labels), rtol=1e-12, atol=0)


def test_a_root_of_a_certain_voxel_has_a_gradient() -> None:
    logits = torch.tensor([[[100.0], [-100.0]]], requires_grad=True)
    hs.losses.focal_loss(logits, torch.zeros(1, 1, dtype=torch.int64), gamma=0.5).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_dice_and_cross_entropy() -> None:
    logits, labels = sample((2, 3, 5, 4, 3))
    weight = torch.rand(3, dtype=torch.float64)
    found = hs.losses.dice_cross_entropy_loss(logits, labels, weight=weight)
    expected = hs.losses.dice_loss(logits, labels) + F.cross_entropy(logits, labels, weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


PAIRS: dict[str, tuple[Any, Any]] = {
    "dice": (hs.losses.dice_loss, monai.losses.DiceLoss),
    "generalised": (
        lambda x, y, **o: hs.losses.generalised_dice_loss(x, y, smooth=0.0, **o),
        lambda **o: monai.losses.GeneralizedDiceLoss(smooth_nr=0.0, smooth_dr=0.0, **o),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_monais_dice(kind: str, background: bool, reduction: str) -> None:
    """With a class that a sample lacks."""
    ours, theirs = PAIRS[kind]
    logits, labels = sample((2, 4, 5, 4, 3), absent=True)
    options = {"include_background": background, "reduction": reduction}
    found = ours(logits, labels, **options)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    loss = theirs(to_onehot_y=True, softmax=True, **options)(logits, labels.unsqueeze(1))
    # MONAI makes the one-hot code in float32.
    torch.testing.assert_close(found, loss.view(found.shape), rtol=1e-6, atol=1e-7)
    (other,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-8)


def test_monais_focal_and_dice_with_cross_entropy() -> None:
    """MONAI's focal loss is in float32 and is averaged over the classes as well."""
    logits, labels = sample((2, 4, 5, 4, 3))
    options: dict[str, Any] = {"to_onehot_y": True, "gamma": 1.5, "alpha": [0.1, 0.2, 0.3, 0.4]}
    expected = monai.losses.FocalLoss(use_softmax=True, **options)(logits, labels.unsqueeze(1)) * 4
    found = hs.losses.focal_loss(logits, labels, gamma=1.5, alpha=options["alpha"])
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=0)
    both = monai.losses.DiceCELoss(softmax=True, to_onehot_y=True)(logits, labels.unsqueeze(1))
    ours = hs.losses.dice_cross_entropy_loss(logits, labels)
    torch.testing.assert_close(ours, both, rtol=1e-6, atol=0)


def test_half_precision_and_small_labels() -> None:
    """Sums are in float32; the class of a voxel may be any type that holds whole numbers."""
    logits, labels = sample((1, 3, 20, 20, 20))
    for loss in (
        hs.losses.dice_loss,
        hs.losses.generalised_dice_loss,
        hs.losses.focal_loss,
        hs.losses.dice_cross_entropy_loss,
    ):
        expected = loss(logits, labels)
        found = loss(logits.bfloat16(), labels)
        assert abs(found.double() - expected) < 0.01
        for dtype in (torch.uint8, torch.int16, torch.float32):
            assert loss(logits, labels.to(dtype)) == expected
    assert hs.losses.dice_loss(logits.half(), labels).dtype == torch.float32


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        ((2, 3, 4, 4), (2, 1, 4, 4)),
        ((2, 3, 4, 4), (2, 4, 5)),
        ((2, 1, 4, 4), (2, 4, 4)),
        ((2, 3), (2,)),
    ],
)
def test_shapes_that_do_not_fit(logits: tuple[int, ...], labels: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"logits \(2, \d.* and labels \(2.*expected \(N, C, ...\)"
    ):
        hs.losses.dice_loss(torch.rand(logits), torch.zeros(labels, dtype=torch.int64))


def test_labels_and_reductions_that_are_none() -> None:
    logits, labels = torch.rand(2, 3, 4), torch.full((2, 4), 3)
    for loss in (hs.losses.focal_loss, hs.losses.dice_cross_entropy_loss):
        with pytest.raises(IndexError):
            loss(logits, labels)
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        hs.losses.dice_loss(logits, labels * 0, reduction="batch")
