"""Losses and metrics that are not ours, and the form in which they take labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.checkpoint.data_card import DataCard
from hyperslab.errors import RecipeError, reason
from hyperslab.recipe.targets.instantiate import A_LOSS, Maker, imported
from hyperslab.recipe.targets.section import TargetSection
from hyperslab.train.parts.given import LossFunction
from hyperslab.train.parts.networks import outputs_of, references_to_data

EXTENTS = (18, 16, 14)
"""Of a volume on which a loss is tried: no two dims of prediction and labels are of one extent."""


def _as_classes(labels: Any, classes: int) -> Any:
    return labels


def _with_channel(labels: Any, classes: int) -> Any:
    return labels.unsqueeze(1)


def _one_hot(labels: Any, classes: int) -> Any:
    return F.one_hot(labels, classes).movedim(-1, 1).float()


FORMS: dict[str, Callable[[Any, int], Any]] = {
    "classes (N, D, H, W)": _as_classes,
    "classes (N, 1, D, H, W)": _with_channel,
    "one-hot codes (N, C, D, H, W)": _one_hot,
}
"""How losses want the class of every voxel: as torch, as MONAI, or as one channel a class."""


@dataclass(frozen=True)
class LossOfLabels:
    """A loss that takes labels in one of `FORMS`."""

    loss: LossFunction
    form: str
    classes: int

    def __call__(self, prediction: Any, labels: Any) -> torch.Tensor:
        """``labels`` are the classes (N, D, H, W)."""
        return self.loss(prediction, FORMS[self.form](labels, self.classes))


def refuse_state(thing: Any, name: str) -> None:
    """Refuse what adds up mini-batches by itself, as torchmetrics' and MONAI's metrics do.

    Each rank's would hold sums of its own box, and the means over a split would be of sums so far.

    Raises:
        RecipeError: it has a state to be reset, and a result of all of it.
    """
    results = [word for word in ("compute", "aggregate") if callable(getattr(thing, word, None))]
    if not results or not callable(getattr(thing, "reset", None)):
        return
    raise RecipeError(
        f"{name} adds up mini-batches in a state of its own ({results[0]}(), reset()), which on "
        "cut volumes would be those of each rank alone\n    name a function of prediction and "
        "target, or a loss; hyperslab averages it over a split, and has Dice, IoU and distances of "
        "surfaces itself"
    )


def loss_from_target(
    section: TargetSection, about: DataCard, key: str, trusted: frozenset[str]
) -> LossFunction:
    """The loss, or the metric, that a recipe names, for such data.

    Raises:
        RecipeError: as `Maker` and `fitting`.
    """
    check_loss(section, key, trusted)
    maker = Maker(key, A_LOSS, references=references_to_data(about), trusted=trusted)
    return fitting(maker(section), about, f"{key}.target {section.target}", trains=key == "loss")


def check_loss(section: TargetSection, key: str, trusted: frozenset[str]) -> None:
    """Find the target of a loss or a metric and look at its arguments; nothing is called.

    Raises:
        RecipeError: as `Maker` and `refuse_state`.
    """
    assert section.target is not None
    found = imported(section.target, f"{key}.target")
    refuse_state(found, f"{key}.target {section.target}")
    Maker(key, A_LOSS, trusted=trusted).check(section)


def fitting(loss: LossFunction, about: DataCard, name: str, *, trains: bool = True) -> LossFunction:
    """The loss with labels in the form that it takes, found out on a small ordinary example.

    Raises:
        RecipeError: it fails on a prediction and a target as such data have them, gives no single
            number, or none with a gradient where it ``trains``.
    """
    refuse_state(loss, name)
    count = outputs_of(about)
    # So many samples that no dim of the labels meets one of the prediction by broadcasting.
    samples = count + 1
    ramp = torch.linspace(-1, 1, samples * count, requires_grad=trains)
    if not about.classes:
        problem = _tried(loss, ramp.view(samples, count), -ramp.detach().view(samples, count))
        if problem:
            raise RecipeError(
                f"{name} fails on a prediction and a target of shape (N, {count}): {problem}"
            )
        return loss
    ramp = torch.linspace(-1, 1, samples * count * 4032, requires_grad=trains)
    prediction = ramp.view(samples, count, *EXTENTS)
    labels = torch.arange(samples * 4032).remainder(count).view(samples, *EXTENTS)
    problems = {}
    for form in FORMS:
        problems[form] = _tried(LossOfLabels(loss, form, count), prediction, labels)
        if not problems[form]:
            return LossOfLabels(loss, form, count)
    tried = "; ".join(f"{form}: {problem}" for form, problem in problems.items())
    raise RecipeError(
        f"{name} takes labels in no form that was tried on a prediction (N, {count}, D, H, W): "
        f"{tried}"
    )


def _tried(loss: LossFunction, prediction: torch.Tensor, target: torch.Tensor) -> str:
    """What is wrong; nothing where it gives one number."""
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*target size.*different to the input size")
            found = loss(prediction, target)
    except Exception as error:  # whatever is wrong in somebody else's code
        return " ".join(reason(error).split())[:160]
    if not isinstance(found, torch.Tensor):
        return f"it gives a {type(found).__name__}, not a tensor"
    if prediction.requires_grad and not found.requires_grad:
        return "what it gives has no gradient"
    return "" if found.numel() == 1 else f"it gives {list(found.shape)}, not one number"


def to_device(loss: LossFunction, device: torch.device) -> LossFunction:
    """The same, with its weights on a device."""
    inner = loss.loss if isinstance(loss, LossOfLabels) else loss
    if isinstance(inner, torch.nn.Module):
        inner.to(device)
    return loss
