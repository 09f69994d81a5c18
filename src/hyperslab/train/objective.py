"""Defines the objective of a training, regression or segmentation: its loss and its metrics.

In reading order: losses by their names in a recipe; an objective, and its measures over a split;
losses and metrics that are not ours, and the form in which they take labels; the objective of a
recipe for the data that there are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyperslab import losses
from hyperslab.checkpoint.run_state import DataCard
from hyperslab.comm import Grid
from hyperslab.comm.agreement import keeping_contact
from hyperslab.comm.bootstrap import world
from hyperslab.errors import RecipeError, UnsupportedOp, reason
from hyperslab.recipe.instantiate import A_LOSS, Maker, imported
from hyperslab.recipe.network import references_to_data
from hyperslab.recipe.schema import Recipe, RegressionLoss, SegmentationLoss
from hyperslab.recipe.section import TargetSection, choose
from hyperslab.tensor import Sharded
from hyperslab.train.metrics import count_confusion, predicted_classes, scores_of, sum_over_ranks
from hyperslab.train.network import NO_USER_OBJECTS, LossFunction, UserObjects, outputs_of
from hyperslab.train.samples import mismatch_message

LOSSES: dict[str, LossFunction] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "gaussian": losses.gaussian_loss,
    "cross_entropy": F.cross_entropy,
    "dice": losses.dice_loss,
    "generalised_dice": losses.generalised_dice_loss,
    "focal": losses.focal_loss,
    "dice_cross_entropy": losses.dice_cross_entropy_loss,
}
"""Losses by their names in a recipe are means over the global mini-batch."""


def named_loss(loss: str | LossFunction) -> LossFunction:
    """Return the loss of this name; one that is none's stays itself; raises as `choose`."""
    return choose(LOSSES, loss, "loss") if isinstance(loss, str) else loss


@dataclass(frozen=True)
class LossOfMeans:
    """A loss or a metric that takes the means alone of what is predicted for a Gaussian."""

    loss: LossFunction

    def __call__(self, prediction: Any, target: Any) -> torch.Tensor:
        return self.loss(prediction[:, : target.shape[1]], target)


COUNTS = {"tp": "true_positives", "fp": "false_positives", "fn": "false_negatives"}


class Objective:
    """Defines the loss of a step and what is measured of a validation, "validation_loss" the first.

    With ``classes`` every voxel gets one; Dice is of all voxels of the split together, and so are
    the counts that it is made of. Without, the numbers that made a volume are predicted. More
    ``metrics`` have the names that they get.

    Raises:
        RecipeError: `LOSSES` has no such name, or a metric's name is that of another measure.
    """

    def __init__(
        self,
        loss: str | LossFunction,
        classes: tuple[str, ...] = (),
        metrics: Mapping[str, LossFunction] | None = None,
    ) -> None:
        self.loss = named_loss(loss)
        gaussian = self.loss is losses.gaussian_loss
        self.mae: LossFunction = LossOfMeans(F.l1_loss) if gaussian else F.l1_loss
        self.classes = classes
        self.metrics = metrics or {}
        own = ["validation_loss", *(() if classes else ("validation_mae",))]
        own += [f"validation_dice_{name}" for name in classes]
        own += [f"{kind}_{name}" for name in classes for kind in COUNTS]
        self.measures = (*own, *(f"validation_{name}" for name in self.metrics))
        for name in self.metrics:
            if f"validation_{name}" in own:
                raise RecipeError(
                    f"metrics.{name}: validation_{name} is measured in any case\n    "
                    "take another name"
                )


class MetricSums:
    """Holds the measures of an objective over one pass of a split, as sums so far.

    Of confusion counts each rank has its own part; these are summed once, in the end.
    """

    def __init__(self, objective: Objective, grid: Grid) -> None:
        self.classes = objective.classes
        self.measures = objective.measures
        self.grid = grid
        errors = {} if self.classes else {"mae": objective.mae}
        self.means = MeansOfMetrics(grid, {**errors, **objective.metrics}, known=("loss",))
        size = len(self.classes)
        self.counts = torch.zeros(size, size, dtype=torch.int64, device=grid.device)

    def add(self, prediction: Sharded, target: Sharded, loss: torch.Tensor) -> None:
        """Count a mini-batch; every rank calls it, and nobody waits."""
        if self.classes:
            predicted = predicted_classes(prediction)
            self.counts += count_confusion(predicted, target, len(self.classes)).sum(0)
        self.means.add(prediction, target, loss)

    def result(self) -> dict[str, float | None]:
        """Return means by the names of `Objective.measures`; all ranks call it and get the same."""
        found = {f"validation_{name}": value for name, value in self.means.result().items()}
        if self.classes:
            whole = sum_over_ranks(self.counts, self.grid).cpu().numpy()
            for name, score in scores_of(whole, self.classes).items():
                dice = score["dice"]
                found[f"validation_dice_{name}"] = None if math.isnan(dice) else dice
                found |= {f"{kind}_{name}": score[key] for kind, key in COUNTS.items()}
        return {name: found[name] for name in self.measures}


class MeansOfMetrics:
    """Metrics of mini-batches, and their means over the samples of a split.

    Each is called with what the loss is called with, so that it is exact on cut tensors or refused.
    ``known`` are the names of numbers that `add` is given, such as the loss itself.

    They should be equal on all ranks, but a loss that is not ours may break that. As ranks decide
    by these means what is best and whether to go on, all get the same: the largest, and no number
    where one rank has none.
    """

    def __init__(
        self, grid: Grid, metrics: Mapping[str, LossFunction], known: Sequence[str] = ()
    ) -> None:
        self.grid = grid
        self.metrics = metrics
        self.names = (*known, *metrics)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=grid.device)
        self.samples = 0

    def add(self, prediction: Sharded, target: Sharded, *known: torch.Tensor) -> None:
        """Count a mini-batch.

        Raises:
            UnsupportedOp: a metric uses an operator that has no rule; names the metric.
        """
        values = [*known, *(self._value(name, prediction, target) for name in self.metrics)]
        for place, value in enumerate(values):
            number = value.full() if isinstance(value, Sharded) else value
            self.sums[place] += number.detach().reshape(()).double() * target.shape[0]
        self.samples += target.shape[0]

    def _value(self, name: str, prediction: Sharded, target: Sharded) -> torch.Tensor:
        try:
            return self.metrics[name](prediction, target)
        except UnsupportedOp as error:
            raise UnsupportedOp(f"metrics.{name}: {error}") from error

    def result(self) -> dict[str, float | None]:
        """Return the means by name; all ranks call it and get the same."""
        sums = self.sums
        if self.grid.size > 1 and len(sums):
            missing = sums.isnan()
            facts = torch.stack([sums.where(~missing, -math.inf), missing.double()])
            with keeping_contact("the measures of a validation"):
                dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=world())
            sums = facts[0].where(facts[1] == 0, math.nan)
        means = [value / self.samples if self.samples else None for value in sums.tolist()]
        return dict(zip(self.names, means, strict=True))


TRIED_EXTENTS = (18, 16, 14)
"""A loss is tried on such a volume: no two dims of prediction and labels have one extent."""


CHANNEL = "classes (N, 1, D, H, W)"
CODES = "one-hot codes (N, C, D, H, W)"

LABEL_FORMS: dict[str, Callable[[Any, int], Any]] = {
    "classes (N, D, H, W)": lambda labels, _: labels,
    CHANNEL: lambda labels, _: labels.unsqueeze(1),
    CODES: lambda labels, classes: F.one_hot(labels, classes).movedim(-1, 1).float(),
}
"""Losses want the class of every voxel as torch, as MONAI, or as one channel a class."""


@dataclass(frozen=True)
class LossOfLabels:
    """A loss that takes labels in one of `LABEL_FORMS`."""

    loss: LossFunction
    form: str
    classes: int

    def __call__(self, prediction: Any, labels: Any) -> torch.Tensor:
        """``labels`` are the classes (N, D, H, W)."""
        return self.loss(prediction, LABEL_FORMS[self.form](labels, self.classes))


def refuse_stateful_metric(thing: Any, name: str) -> None:
    """Refuse what adds up mini-batches by itself, as torchmetrics and MONAI do (`RecipeError`).

    Each rank's would hold sums of its own box, and the means over a split would be of sums so far.
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


def loss_from_target(section: TargetSection, about: DataCard, key: str) -> LossFunction:
    """Return the loss, or the metric, that a recipe names, for such data; raises as `Maker`."""
    maker = Maker(key, A_LOSS, references=references_to_data(about.shape, outputs_of(about)))
    return with_fitting_labels(
        maker(section), about, f"{key}.target {section.target}", trains=key == "loss"
    )


def check_loss_target(section: TargetSection, key: str) -> None:
    """Look at the target of a loss or a metric, without calling it; raises as `Maker`."""
    assert section.target is not None
    found = imported(section.target, f"{key}.target", section.trust)
    refuse_stateful_metric(found, f"{key}.target {section.target}")
    Maker(key, A_LOSS).check(section)


def with_fitting_labels(
    loss: LossFunction, about: DataCard, name: str, *, trains: bool = True
) -> LossFunction:
    """Return the loss with labels in the form that it takes, found out on a small ordinary example.

    Raises:
        RecipeError: it fails on a prediction and a target as such data have them, gives no single
            number, or none with a gradient where it ``trains``.
    """
    refuse_stateful_metric(loss, name)
    count = outputs_of(about)
    # So many samples that no dim of the labels meets one of the prediction by broadcasting.
    samples = count + 1
    ramp = torch.linspace(-1, 1, samples * count, requires_grad=trains)
    if not about.classes:
        problem = _problem_of_loss(
            loss, ramp.view(samples, count), -ramp.detach().view(samples, count)
        )
        if problem:
            raise RecipeError(
                f"{name} fails on a prediction and a target of shape (N, {count}): {problem}"
            )
        return loss
    ramp = torch.linspace(-1, 1, samples * count * 4032, requires_grad=trains)
    prediction = ramp.view(samples, count, *TRIED_EXTENTS)
    labels = torch.arange(samples * 4032).remainder(count).view(samples, *TRIED_EXTENTS)
    # Where it takes those of another number of samples, samples meet each other by broadcasting.
    more = torch.cat([labels, labels[:1]])
    problems = {}
    lax: list[LossOfLabels] = []
    for form in LABEL_FORMS:
        found = LossOfLabels(loss, form, count)
        problems[form] = _problem_of_loss(found, prediction, labels)
        if problems[form]:
            continue
        if form == CHANNEL and _wants_codes(loss, prediction, labels, count):
            return LossOfLabels(loss, CODES, count)
        if _problem_of_loss(found, prediction, more):
            return found
        lax.append(found)
    if lax:
        return lax[0]
    tried = "; ".join(f"{form}: {problem}" for form, problem in problems.items())
    raise RecipeError(
        f"{name} takes labels in no form that was tried on a prediction (N, {count}, D, H, W): "
        f"{tried}"
    )


def _wants_codes(
    loss: LossFunction, prediction: torch.Tensor, labels: torch.Tensor, count: int
) -> bool:
    """Tell whether a loss that accepts (N, 1, D, H, W) is for one-hot codes all the same.

    As ``(p.softmax(1) * y).sum()`` is: by broadcasting the numbers of classes pass for codes. If
    the right prediction is the best one in one of both forms alone, it is that. Otherwise, as of a
    loss that no prediction of classes makes least, such a loss computes with the numbers, so that
    it has a gradient by them, and it takes the codes of as many classes as it has predictions of,
    not of one more.
    """
    right = [_knows_right(LossOfLabels(loss, form, count), labels[:2]) for form in (CHANNEL, CODES)]
    if right[0] != right[1]:
        return right[1]
    numbers = LABEL_FORMS[CHANNEL](labels, count).float().requires_grad_()
    with torch.enable_grad():
        found = _result_of_loss(loss, prediction.detach(), numbers)
    if not isinstance(found, torch.Tensor) or not found.requires_grad:
        return False  # it wants whole numbers, or does not compute with any
    computes = torch.autograd.grad(found.sum(), numbers, allow_unused=True)[0] is not None
    takes = [
        not _problem_of_loss(LossOfLabels(loss, CODES, classes), prediction, labels)
        for classes in (count, count + 1)
    ]
    return computes and takes == [True, False]


ROUNDING = 1e-4
"""Losses that differ by less of the largest one are taken for equal."""


def _knows_right(loss: LossOfLabels, labels: torch.Tensor) -> bool:
    """Tell whether the right prediction has the least loss, or the highest score, of a few.

    The others are that of the next class everywhere and those of one class for all. They are
    between 0 and 1, as of networks that give probabilities, and have the same order as logits.
    """
    classes = loss.classes
    one = (torch.full_like(labels, number) for number in range(min(classes, 8)))
    values = []
    for guess in (labels, (labels + 1).remainder(classes), *one):
        found = _result_of_loss(loss, 0.02 + 0.96 * LABEL_FORMS[CODES](guess, classes), labels)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            return False
        values.append(float(found.detach()))
    right, *others = values
    off = ROUNDING * max(map(abs, values))
    return right < min(others) - off or right > max(others) + off


def _result_of_loss(loss: LossFunction, prediction: torch.Tensor, target: torch.Tensor) -> Any:
    """Return what somebody's loss gives, or the exception that it raises, of whatever kind."""
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*target size.*different to the input size")
            return loss(prediction, target)
    except Exception as error:
        return error


def _problem_of_loss(loss: LossFunction, prediction: torch.Tensor, target: torch.Tensor) -> str:
    """Return what is wrong with a loss; nothing where it gives one number."""
    found = _result_of_loss(loss, prediction, target)
    if isinstance(found, Exception):
        return " ".join(reason(found).split())[:160]
    if not isinstance(found, torch.Tensor):
        return f"it gives a {type(found).__name__}, not a tensor"
    if prediction.requires_grad and not found.requires_grad:
        return "what it gives has no gradient"
    return "" if found.numel() == 1 else f"it gives {list(found.shape)}, not one number"


def loss_to_device(loss: LossFunction, device: torch.device) -> LossFunction:
    """Return the same, with its weights on a device."""
    inner = loss.loss if isinstance(loss, LossOfLabels) else loss
    if isinstance(inner, torch.nn.Module):
        inner.to(device)
    return loss


def build_objective(
    recipe: Recipe, about: DataCard, given: UserObjects = NO_USER_OBJECTS
) -> Objective:
    """Build the recipe's loss, and the measures that go with such data.

    Raises:
        RecipeError: the loss is for another kind of data; or of a target what `Maker` raises.
    """
    loss = given.loss or recipe.loss
    if isinstance(loss, str) and loss not in losses_for(about):
        raise RecipeError(mismatch_message(recipe, about.classes))
    if isinstance(loss, TargetSection):
        loss = loss_from_target(loss, about, "loss")
    elif not isinstance(loss, str):
        loss = with_fitting_labels(loss, about, "the loss", trains=True)
    return Objective(loss, about.classes, build_metrics(recipe, about, given))


def build_metrics(
    recipe: Recipe, about: DataCard, given: UserObjects = NO_USER_OBJECTS
) -> dict[str, LossFunction]:
    """Build what the recipe measures besides; raises what `build_objective` does.

    Of a Gaussian all see the means alone, but for its own loss.
    """
    gaussian = recipe.loss == "gaussian"
    known = [name for name in losses_for(about) if gaussian or name != "gaussian"]
    found: dict[str, LossFunction] = {}
    for name, metric in {**recipe.metrics, **given.metrics}.items():
        key = f"metrics.{name}"
        if key in recipe.handed_in and name not in given.metrics:
            continue
        if isinstance(metric, TargetSection):
            found[name] = loss_from_target(metric, about, key)
        elif isinstance(metric, str):
            if metric not in known:
                words = f"{key}={metric} does not go with the data and the loss"
                raise RecipeError(f"{words}: use one of {', '.join(known)}")
            found[name] = named_loss(metric)
        else:
            found[name] = with_fitting_labels(metric, about, key, trains=False)
        if gaussian and found[name] is not losses.gaussian_loss:
            found[name] = LossOfMeans(found[name])
    return found


def losses_for(about: DataCard) -> tuple[str, ...]:
    """Return the names of losses that go with such data."""
    return get_args(SegmentationLoss if about.classes else RegressionLoss)
