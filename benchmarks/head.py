"""What a network on statistics says beyond a ridge on them, from few universes to many.

    python benchmarks/head.py RECIPE --kept FOLDER [--sizes N ...] [--seeds S ...] [--levers]
                              [--coverage] --json OUT [--run FOLDER] [--dry-run]

RECIPE has `model: {name: multiscale, channels: [], summary_statistics: true}`: the network's
features are statistics of the volume, no weights are before them, and so they are computed once,
by the network's own modules. FOLDER keeps them, the statistics of `ridge.py`, and all that is
trained, piece by piece: stopped, the program goes on where it was. ``--dry-run`` tries what is
missing on a small scale, and says how long it will take. Then only the head is trained, for many
epochs in seconds, on the first N training samples, and so is the ridge.

How the head is trained:

1. A linear layer of the features is a ridge regression in closed form on the targets and their
   products; leaving each training sample out (a closed form, too) chooses its strengths.
2. A dense network learns from what that layer says of training samples *that were left out* what
   the line misses. What it says of samples that it has seen is too good to learn from.
3. Both together are the head of `MultiscaleNet` exactly: its first dense layer is the product of
   the linear one and the first of the dense network, and the line passes through its leaky ReLUs
   as the difference of two halves.

The curve is the mean of four, which is one dense network again; two of them read the line of the
targets alone. In each step training samples are moved to targets nearby: what the line says of a
sample is the mean answer to its targets, a polynomial of them, and what is particular to the sample
and stays as it is.

The validation samples choose how long to train, and the ridge's statistics and strengths.
``--levers`` changes one choice at a time, with the first seed. ``--coverage`` trains a network that
predicts a covariance, too, and says how often its intervals and the ridge's hold the true value.
``--run`` writes the network of all training samples and the first seed as a run, for `hyperslab
evaluate RUN --checkpoint head`.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clock import machine
from kept import Arrays, Kept, Trial, extrapolated, run_planned
from numpy.typing import NDArray
from regression_control import PENALTIES, FloatArray, Split, fit_ridge
from ridge import ALONE, split_of
from summary_statistics import SETS, summary_statistics
from torch import nn

import hyperslab as hs
from hyperslab.errors import DataError
from hyperslab.formats.source import Source
from hyperslab.formats.targets import Parameters
from hyperslab.geometry import Box
from hyperslab.losses import gaussian_loss, gaussian_outputs
from hyperslab.recipe.load import load_recipe, save_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train.builders import open_data
from hyperslab.train.metrics import Predictions, ratio_interval
from hyperslab.train.uncertainty import (
    moments_of,
    rank_statistics,
    standard_deviations,
    uncertainty_of,
)
from hyperslab.util.atomic_files import write_json

PIECE = 128
"""Samples whose statistics are kept in one file."""

Measure = Callable[[NDArray[Any]], Arrays]


def measured(kept: Kept, kind: str, source: Source, measure: Measure) -> dict[str, NDArray[Any]]:
    """What ``measure`` finds in all volumes, two at a time, so many of them in a piece.

    Raises:
        DataError: what is kept was found in other volumes.
    """

    def found(names: Sequence[str], first: int) -> Arrays:
        parts = []
        stop = first + len(names)
        for start in range(first, stop, 2):
            samples = range(start, min(start + 2, stop))
            volumes = [source.read(sample, Box.whole(source.shape)) for sample in samples]
            parts.append(measure(np.stack(volumes)))
        arrays = {key: np.concatenate([one[key] for one in parts]) for key in parts[0]}
        return {"names": np.array(names), "targets": targets[first:stop], **arrays}

    def tried(names: Sequence[str], first: int) -> Trial:
        found(names[:2], first)  # what is done first in a process takes longer
        some = names[:6]
        begin = time.perf_counter()
        arrays = {**found(some, first)}
        each = (time.perf_counter() - begin) / len(some)
        del arrays["names"], arrays["targets"]
        random = np.random.default_rng(0)  # statistics that are all alike would be quicker
        like = {
            key: random.standard_normal((len(one) // len(some) * len(names), one.shape[1]))
            for key, one in arrays.items()
        }
        return Trial(each * len(names), like)

    targets = np.array([source.target(sample) for sample in range(len(source.names))])
    pieces: list[dict[str, NDArray[Any]]] = []
    for first in range(0, len(source.names), PIECE):
        names = list(source.names[first : first + PIECE])
        piece = kept.arrays(
            f"statistics, {kind}",
            f"{kind}-{first:05}",
            partial(found, names, first),
            partial(tried, names, first),
            ("statistics", kind, len(names)),
        )
        same = piece.pop("names", np.array(names)).tolist() == names
        own = targets[first : first + len(names)]  # of two simulations names may be the same
        if not same or not np.array_equal(piece.pop("targets", own), own):
            raise DataError(
                f"{kept.folder} has in {kind}-{first:05}.npz the statistics of other volumes; "
                f"name another folder"
            )
        pieces.append(piece)
    return {key: np.concatenate([one[key] for one in pieces]) for key in pieces[0]}


@dataclass(frozen=True, eq=False)
class Universes:
    """What is known of N volumes: targets (N, P), features (N, F) and the sets of a ridge.

    ``sets`` have the features, too, as a ridge may choose them. ``names`` are the targets',
    ``shape`` (C, D, H, W) is a volume's. Where the volumes are parts of larger ones, ``parts`` of
    them follow each other.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    targets: FloatArray
    features: FloatArray
    sets: Mapping[str, FloatArray]
    split: Split
    parts: int = 1

    @cached_property
    def key(self) -> str:
        """Tells what was fitted and chosen on these volumes and sets from what was on others."""
        parts = (self.targets, self.features, self.split["train"], self.split["validation"])
        widths = {name: numbers.shape[1] for name, numbers in self.sets.items()}
        return named([*(digest((part,)) for part in parts), widths])

    def learnt_from(self, count: int) -> str:
        """Tells networks of the first ``count`` training samples from others, whatever the test."""
        samples = np.concatenate([self.split["train"][:count], self.split["validation"]])
        return digest((self.targets[samples], self.features[samples]))


def digest(parts: Sequence[NDArray[Any]]) -> str:
    """A number that is different where any array is."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(part) for part in parts)).hexdigest()


def universes_of(recipe: Recipe, kept: Kept) -> Universes:
    """All volumes of a recipe, by what is kept of them."""
    with open_data(recipe, hs.Grid(), split="all") as data:
        source = data.source
        names = source.parameters.names
        own = features_of(recipe, source, kept)
        parts = measured(kept, "ridge", source, summary_statistics)
    sets = {
        name: np.concatenate([parts[part] for part in of], axis=1, dtype=np.float64)
        for name, of in SETS.items()
    }
    sets["network"] = own
    listed = [source.target(sample) for sample in range(len(source.names))]
    targets = np.array(listed, dtype=np.float64)
    split = split_of(source, recipe, recipe.data.seed)
    return Universes(names, source.shape, targets, own, sets, split)


def with_first_features(data: Universes) -> Universes:
    """The same volumes for a ridge that may take the first features alone, as the head's line may.

    With as many universes as there are, no ridge is known that is better.
    """
    some = [count for count in AS_SHIPPED.counts if count < data.features.shape[1]]
    first = {f"network, first {count}": data.features[:, :count] for count in some}
    return replace(data, sets={**data.sets, **first})


def features_of(recipe: Recipe, source: Source, kept: Kept, width: int | None = None) -> FloatArray:
    """The network's features (N, F) of all volumes; with ``width`` of cubes cut out of them."""
    shape = source.shape if width is None else (source.shape[0], width, width, width)
    net = network(recipe, shape, len(source.parameters.names))

    def measure(counts: NDArray[Any]) -> Arrays:
        volumes = torch.from_numpy(counts if width is None else cubes(counts, width))
        with torch.no_grad():
            return {"features": net.features(torch.log1p(volumes.float())).numpy()}

    kind = "network" if width is None else f"network-{width}"
    return measured(kept, kind, source, measure)["features"].astype(np.float64)


def cubes(volumes: NDArray[Any], width: int) -> NDArray[Any]:
    """Volumes (N, C, D, H, W) as cubes (N * k, C, w, w, w), in the order of `Subvolumes`."""
    n, channels, *extents = volumes.shape
    d, h, w = (extent // width for extent in extents)
    apart = volumes.reshape(n, channels, d, width, h, width, w, width)
    return apart.transpose(0, 2, 4, 6, 1, 3, 5, 7).reshape(-1, channels, width, width, width)


def network(recipe: Recipe, shape: tuple[int, ...], outputs: int) -> hs.models.MultiscaleNet:
    """The recipe's network; of statistics alone, so that its features need no training."""
    net = recipe.model.build(shape, outputs, where=str(recipe.data.where))
    if not isinstance(net, hs.models.MultiscaleNet) or len(net.stages):
        raise DataError("head.py trains model: {name: multiscale, channels: []}")
    return net.eval()


@dataclass
class Line:
    """Says targets (T,) of features (F,) by a linear layer, and what it said of n samples.

    ``seen`` (n, T) is said by the layer itself, ``left_out`` by one of the other samples.
    """

    weight: FloatArray
    bias: FloatArray
    seen: FloatArray
    left_out: FloatArray

    def __call__(self, x: FloatArray) -> FloatArray:
        return x @ self.weight + self.bias


class LinearLayer(Line):
    """Ridge regressions of targets (n, T) on features (n, F), in closed form.

    Features are divided by a power of their spread: 1 makes all alike, less lets those count more
    that differ more. Each target has the number of features, from the first on, the power and the
    penalty with the least squared error over the samples themselves, each predicted by the others
    (Allen 1974).
    """

    def __init__(
        self,
        x: FloatArray,
        y: FloatArray,
        powers: Sequence[float] = (1.0,),
        counts: Sequence[int] = (),
    ) -> None:
        middle, mean, spread = x.mean(0), y.mean(0), x.std(0)
        best = np.full(y.shape[1], np.inf)
        self.chosen = [(0, 0.0, 0.0)] * y.shape[1]
        """By target, the number of features, the power and the penalty."""
        self.left_out = np.empty_like(y)
        self.seen = np.empty_like(y)
        self.weight = np.zeros((x.shape[1], y.shape[1]))
        for count, power in product(counts or (len(spread),), powers):
            first = np.arange(len(spread)) < count
            used = first & (spread > 0)
            scale = np.divide(1, spread**power, out=np.zeros_like(spread), where=used)
            scale /= np.sqrt(np.mean((spread * scale) ** 2))
            scaled = ((x - middle) * scale)[:, first]
            variances, axes = np.linalg.eigh(scaled.T @ scaled / len(x))
            along = scaled @ axes
            covariances = along.T @ (y - mean) / len(x)
            for penalty in PENALTIES:
                shrunk = 1 / (variances.clip(0) + penalty)
                own = along**2 @ shrunk / len(x) + 1 / len(x)  # of a target in what is said of it
                found = along @ (covariances * shrunk[:, None]) + mean
                off = (y - found) / (1 - own.clip(max=1 - 1e-9))[:, None]
                errors = np.mean(off**2, axis=0)
                for target in np.flatnonzero(errors < best):
                    best[target] = errors[target]
                    self.chosen[target] = (count, power, float(penalty))
                    self.left_out[:, target] = (y - off)[:, target]
                    self.seen[:, target] = found[:, target]
                    self.weight[:, target] = 0
                    own_weight = axes @ (covariances[:, target] * shrunk)
                    self.weight[first, target] = scale[first] * own_weight
        self.bias = mean - middle @ self.weight


FOLDS = 8


class FoldedLayer(LinearLayer):
    """A linear layer of samples that are parts of volumes, whose numbers are ``volumes`` (n,).

    Each sample is predicted by seven eighths of the volumes, as its own volume's other parts would
    give its targets away; a volume that is left out alone has no closed form that is as fast. All
    errors follow from the features' products, which are summed once.
    """

    def __init__(
        self,
        x: FloatArray,
        y: FloatArray,
        powers: Sequence[float],
        counts: Sequence[int],
        volumes: NDArray[np.intp],
    ) -> None:
        middle, mean, spread = x.mean(0), y.mean(0), x.std(0)
        standard = (x - middle) / np.where(spread > 0, spread, 1)
        fold = volumes % FOLDS
        own = [(standard[fold == one], (y - mean)[fold == one]) for one in range(FOLDS)]
        grams = np.stack([numbers.T @ numbers for numbers, _ in own])
        covariances = np.stack([numbers.T @ off for numbers, off in own])
        squares = sum((off**2).sum(0) for _, off in own)
        best = np.full(y.shape[1], np.inf)
        self.chosen = [(0, 0.0, 0.0)] * y.shape[1]
        weights = np.zeros((FOLDS + 1, *covariances.shape[1:]))  # without each fold, and of all
        for count, power in product(counts or (len(spread),), powers):
            used = (np.arange(len(spread)) < count) & (spread > 0)
            scale = np.where(used, spread ** (1 - power), 0)
            scale /= np.sqrt(np.mean(scale**2))
            fits = []
            for left_out in range(FOLDS + 1):
                rest = np.arange(FOLDS) != left_out
                samples = np.isin(fold, np.flatnonzero(rest)).sum()
                scaled = scale[:, None] * grams[rest].sum(0) * scale / samples
                variances, axes = np.linalg.eigh(scaled)
                along = axes.T @ (scale[:, None] * covariances[rest].sum(0)) / samples
                fits.append((scale[:, None] * axes, variances.clip(0), along))
            for penalty in PENALTIES:
                tried = np.stack([a @ (c / (v + penalty)[:, None]) for a, v, c in fits])
                errors = squares + (tried[:-1] * (grams @ tried[:-1] - 2 * covariances)).sum((0, 1))
                better = errors < best
                best[better] = errors[better]
                weights[:, :, better] = tried[:, :, better]
                for target in np.flatnonzero(better):
                    self.chosen[target] = (count, power, float(penalty))
        self.left_out = np.empty_like(y)
        for one, (numbers, _) in enumerate(own):
            self.left_out[fold == one] = numbers @ weights[one] + mean
        self.seen = standard @ weights[-1] + mean
        self.weight = weights[-1] / np.where(spread > 0, spread, 1)[:, None]
        self.bias = mean - middle @ self.weight


def line_of(data: Universes, count: int, how: Training, kept: Kept) -> Line:
    """The linear layer of the first training samples, on products of targets; of any seed."""
    train = data.split["train"][:count]
    targets = products(data.targets[train], how.degree)

    def fitted(count: int) -> Line:
        x, y = data.features[train[:count]], targets[:count]
        if data.parts > 1:
            return FoldedLayer(x, y, how.powers, how.counts, train[:count] // data.parts)
        return LinearLayer(x, y, how.powers, how.counts)

    def tried() -> Trial:
        seconds = extrapolated(fitted, (128, 512), count)
        weight = np.zeros((data.features.shape[1], targets.shape[1]))
        off = targets + np.random.default_rng(0).normal(size=targets.shape)
        return Trial(seconds, vars(Line(weight, targets.mean(0), off, off)))

    about = [how.degree, how.powers, how.counts, data.parts]
    name = f"line-{count}-{named([*about, data.learnt_from(count)])}"
    alike = ("line", count, len(data.features), *about)
    made = kept.arrays("lines", name, lambda: asdict(fitted(count)), tried, alike)
    return Line(**made)


def named(about: object) -> str:
    """Part of a piece's name that is different where any of these facts is."""
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]


def products(y: FloatArray, degree: int) -> FloatArray:
    """The targets (N, P), then their products of up to ``degree`` factors."""
    columns = range(y.shape[1])
    chosen = [
        list(one) for n in range(1, degree + 1) for one in combinations_with_replacement(columns, n)
    ]
    return np.stack([y[:, one].prod(1) for one in chosen], axis=1)


@dataclass(frozen=True, slots=True)
class Training:
    """How a head is trained; the fields are what ``--levers`` changes one by one."""

    degree: int = 3  # of the products of targets that the linear layer predicts
    powers: tuple[float, ...] = (1.0, 0.7, 0.4)  # of spreads by which it may divide features
    counts: tuple[int, ...] = (100, 160, 340, 856)  # of features, the first ones, it may take
    line: bool = True  # the linear layer is the ridge; otherwise the head begins at random
    left_out: bool = True  # the dense network learns from predictions of samples left out
    together: bool = False  # then all of the head goes on at a thirtieth of the rate
    gaussian: bool = False  # the loss: of a covariance, too; otherwise squared errors
    steps: int = 2000
    batch: int = 64
    rate: float = 1e-3
    decay: float = 1.0
    dropout: float = 0.0
    average: float = 0.99  # of weights over steps
    members: int = 4  # dense networks whose mean is the head's curve
    plain: int = 2  # of them that see the targets' own lines alone, of samples moved anywhere
    moved: float = 0.5  # how far training samples are moved in their targets, in every step
    validated: bool = True  # the weights with the least validation loss; otherwise the last


AS_SHIPPED = Training()

WARM = 0.05
"""The share of the steps in which the rate rises."""

LOOKS = 40
"""How often the validation samples are looked at."""


@dataclass(frozen=True, slots=True)
class Response:
    """How inputs (N, F) answer to targets (N, P) in the mean: a polynomial of them.

    What a line says of a universe is the mean answer to its targets and what is particular to the
    universe. The latter stays as it is when the universe is moved to targets nearby, and so few
    universes stand for many. ``weight`` (M, F) is of products of up to ``degree`` targets; the
    first P inputs are the line's own predictions, divided by ``width`` (P,).
    """

    weight: torch.Tensor
    width: torch.Tensor
    least: torch.Tensor
    largest: torch.Tensor
    degree: int

    @classmethod
    def of(cls, inputs: FloatArray, y: FloatArray, width: FloatArray, degree: int) -> Response:
        terms = np.concatenate([np.ones((len(y), 1)), products(y, degree)], 1)
        weight = np.linalg.lstsq(terms, inputs, rcond=None)[0][1:]
        found = (torch.tensor(one).float() for one in (weight, width, y.min(0), y.max(0)))
        return cls(*found, degree)

    def moved(self, y: torch.Tensor, far: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Other targets, about ``far`` from y in the same box, and steps of inputs and line.

        Walls of the box reflect; infinitely far is anywhere in it.
        """
        size = self.largest - self.least
        if math.isinf(far):
            goal = self.least + size * torch.rand_like(y)
        else:
            turn = (y + far * torch.randn_like(y) - self.least).remainder(2 * size)
            goal = self.least + torch.minimum(turn, 2 * size - turn)
        terms = [products(one.numpy(), self.degree) for one in (y, goal)]
        step = torch.from_numpy(terms[1] - terms[0]) @ self.weight
        return goal, step, step[:, : y.shape[1]] * self.width


@dataclass(frozen=True, slots=True)
class Problem:
    """What a module learns: targets (N, P) by ``base`` + ``scale`` * outputs of inputs (N, F).

    Errors are squared in units of ``unit`` (P,). ``precision`` (P,) is what a Gaussian's logarithms
    of precisions begin with.
    """

    inputs: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    targets: torch.Tensor
    unit: torch.Tensor
    precision: torch.Tensor
    response: Response | None = None

    @classmethod
    def of(cls, *arrays: FloatArray, response: Response | None = None) -> Problem:
        found = (torch.tensor(array, dtype=torch.float32) for array in arrays)
        return cls(*found, response=response)

    def loss(self, module: nn.Module, chosen: torch.Tensor, moved: float = 0.0) -> torch.Tensor:
        inputs, base, y = self.inputs[chosen], self.base[chosen], self.targets[chosen]
        if moved and self.response is not None:
            y, step, base_step = self.response.moved(y, moved)
            inputs, base = inputs + step, base + base_step
        found = module(inputs)
        count = y.shape[1]
        mean = base + self.scale * found[:, :count]
        if found.shape[1] == count:
            return ((mean - y) / self.unit).square().mean()
        own, rest = found[:, count : 2 * count] + self.precision, found[:, 2 * count :]
        return gaussian_loss(torch.cat([mean, own, rest], 1), y)


def fit(
    module: nn.Module,
    problem: Problem,
    train: NDArray[np.intp],
    validation: NDArray[np.intp],
    how: Training,
) -> None:
    """Train a module in place; it ends with the averaged weights that were best in validation."""
    weights = [weight for weight in module.parameters() if weight.ndim > 1]
    biases = [weight for weight in module.parameters() if weight.ndim == 1]
    groups = [{"params": weights, "weight_decay": how.decay}, {"params": biases}]
    optimizer = torch.optim.AdamW(groups, lr=how.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min((step + 1) / (WARM * how.steps), 1) * (1 + math.cos(math.pi * step / how.steps)) / 2
        ),
    )
    averages = torch.optim.swa_utils.AveragedModel(
        module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(how.average)
    )
    samples, seen = torch.from_numpy(train), torch.from_numpy(validation)
    least, best = math.inf, copy.deepcopy(module.state_dict())
    order = torch.empty(0, dtype=torch.long)
    for step in range(how.steps + 1):
        if step % (how.steps // LOOKS) == 0:
            averages.eval()
            with torch.no_grad():
                found = float(problem.loss(averages, seen))
            if found < least or not how.validated:
                least, best = found, copy.deepcopy(averages.module.state_dict())
        if len(order) < how.batch:
            order = samples[torch.randperm(len(samples))]
        chosen, order = order[: how.batch], order[how.batch :]
        module.train()
        optimizer.zero_grad()
        problem.loss(module, chosen, how.moved).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        averages.update_parameters(module)
    module.load_state_dict(best)
    module.eval()


def train_head(
    net: hs.models.MultiscaleNet,
    data: Universes,
    count: int,
    seed: int,
    how: Training,
    layer: Line | None,
) -> None:
    """Train the head of a network on the first ``count`` training samples, in place.

    It begins as the ``layer``, or at random.
    """
    torch.manual_seed(seed)
    train, validation = data.split["train"][:count], data.split["validation"]
    x, y = data.features, data.targets
    mean, variance = x[train].mean(0), x[train].var(0)
    net.norm.load_state_dict(
        {
            **net.norm.state_dict(),
            "running_mean": torch.from_numpy(mean),
            "running_var": torch.from_numpy(variance),
            "num_batches_tracked": torch.tensor(net.norm.batches),  # it has settled
        }
    )
    spread = np.sqrt(variance + net.norm.eps)
    none, one = np.zeros(y.shape[1]), np.ones(y.shape[1])
    if layer is None:
        middle, off = y[train].mean(0), y[train].std(0)
        begins = precision_of(off)
        standard = (x - mean) / spread
        problem = Problem.of(standard, np.tile(middle, (len(y), 1)), off, y, off, begins)
        fit(net.head, problem, train, validation, how)
        scale_outputs(net.head[-1], off, middle, begins)
        return
    z = layer(x)
    z[train] = layer.left_out if how.left_out else layer.seen
    base = z[:, : y.shape[1]]
    off = np.sqrt(np.mean((base - y)[train] ** 2, axis=0))
    begins = precision_of(off)
    middle, width = z[train].mean(0), z[train].std(0)
    inputs = (z - middle) / width
    curves = []
    for member in range(how.members):
        plain = member < how.plain
        seen = inputs[:, : y.shape[1]] if plain else inputs
        degree = min(how.degree, 2) if plain else how.degree
        response = Response.of(seen[train], y[train], width[: y.shape[1]], degree)
        problem = Problem.of(seen, base, off, y, off, begins, response=response)
        curve = dense(seen.shape[1], net.head, 2 * y.shape[1], how.dropout, how.members)
        own = replace(how, moved=math.inf, decay=how.decay / 10) if plain else how
        fit(curve, problem, train, validation, own)
        curves.append(curve)
    curve = averaged(curves, z.shape[1])
    scale_outputs(curve[-1], off, none, begins)
    fold(
        net.head,
        (spread[:, None] * layer.weight / width).T,
        (mean @ layer.weight + layer.bias - middle) / width,
        curve,
        width,
        middle,
    )
    if how.together:
        standard = (x - mean) / spread
        problem = Problem.of(standard, np.zeros_like(y), one, y, off, none)
        fit(net.head, problem, train, validation, replace(how, rate=how.rate / 30, decay=0.0))


def precision_of(off: FloatArray) -> FloatArray:
    """What a network predicts if `gaussian_loss` is to take ``off`` (P,) for deviations."""
    return 10 * np.arctanh(-np.log(off) / 10)


def dense(
    inputs: int, head: nn.Sequential, passing: int, dropout: float, members: int = 1
) -> nn.Sequential:
    """One of several heads of ``inputs`` numbers, which share the width that is not passed through.

    It predicts zero.

    Raises:
        DataError: they cannot share it evenly.
    """
    made = copy.deepcopy(head)
    wide = [(made[place].out_features - passing) // members for place in (0, 3)]
    if members * wide[0] != made[0].out_features - passing:
        raise DataError(
            f"{members} networks cannot share model.hidden={made[0].out_features} evenly, of which "
            f"{passing} are the line's"
        )
    made[0] = nn.Linear(inputs, wide[0])
    made[3] = nn.Linear(wide[0], wide[1])
    made[6] = nn.Linear(wide[1], head[6].out_features)
    nn.init.zeros_(made[6].weight)
    nn.init.zeros_(made[6].bias)
    made[2].p = made[5].p = dropout
    return made


def averaged(curves: Sequence[nn.Sequential], inputs: int) -> nn.Sequential:
    """One network of ``inputs`` numbers: the mean of some that read all or the first of them."""
    made = copy.deepcopy(curves[0])
    first, second, third = ([one[place] for one in curves] for place in (0, 3, 6))
    with torch.no_grad():
        rows = [nn.functional.pad(one.weight, (0, inputs - one.in_features)) for one in first]
        made[0] = linear(torch.cat(rows), torch.cat([one.bias for one in first]))
        blocks = torch.block_diag(*(one.weight for one in second))
        made[3] = linear(blocks, torch.cat([one.bias for one in second]))
        share = 1 / len(curves)
        mean = torch.stack([one.bias for one in third]).mean(0)
        made[6] = linear(torch.cat([share * one.weight for one in third], 1), mean)
    return made


def linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    """A linear layer of these weights (O, I)."""
    made = nn.Linear(weight.shape[1], weight.shape[0])
    made.weight, made.bias = nn.Parameter(weight), nn.Parameter(bias)
    return made


def scale_outputs(
    last: nn.Linear, scale: FloatArray, shift: FloatArray, begins: FloatArray
) -> None:
    """Let a layer predict ``shift`` + ``scale`` * what it did; precisions begin at ``begins``."""
    count = len(scale)
    with torch.no_grad():
        last.weight[:count] *= torch.from_numpy(scale)[:, None]
        last.bias[:count] = last.bias[:count] * torch.from_numpy(scale) + torch.from_numpy(shift)
        if len(last.bias) > count:
            last.bias[count : 2 * count] += torch.from_numpy(begins)


def fold(
    head: nn.Sequential,
    weight: FloatArray,
    bias: FloatArray,
    curve: nn.Sequential,
    width: FloatArray,
    middle: FloatArray,
) -> None:
    """Make a head of a linear layer (T, F) and a dense network of its outputs z, in place.

    It predicts middle + width * z, of the first P, and what the network ``curve`` adds.
    """
    count = (head[0].out_features - curve[0].out_features) // 2
    through = 1 / (1 + head[1].negative_slope)  # z is the difference of what its halves let through
    halves = torch.eye(count, dtype=torch.float64)
    halves = torch.cat([halves, -halves])
    line, constant = torch.from_numpy(weight), torch.from_numpy(bias)
    own = [(layer.weight.double(), layer.bias.double()) for layer in curve[::3]]
    (first, first_bias), (second, second_bias), (third, third_bias) = own
    z = halves.T * through
    out = torch.from_numpy(width[:count])[:, None] * z
    shift = torch.zeros(len(third), dtype=torch.float64)
    shift[:count] = torch.from_numpy(middle[:count])
    out = torch.cat([out, torch.zeros(len(third) - count, 2 * count, dtype=torch.float64)])
    folded = [
        (
            torch.cat([halves @ line[:count], first @ line]),
            torch.cat([halves @ constant[:count], first @ constant + first_bias]),
        ),
        (
            torch.block_diag(halves @ z, second),
            torch.cat([torch.zeros(2 * count, dtype=torch.float64), second_bias]),
        ),
        (torch.cat([out, third], 1), third_bias + shift),
    ]
    with torch.no_grad():
        for layer, (weights, biases) in zip(head[::3], folded, strict=True):
            layer.weight.copy_(weights)
            layer.bias.copy_(biases)


def outputs_for(data: Universes, how: Training) -> int:
    """How many numbers a network predicts."""
    return gaussian_outputs(len(data.names)) if how.gaussian else len(data.names)


def said_of(net: hs.models.MultiscaleNet, features: FloatArray) -> FloatArray:
    """What a network says of features (N, F): (N, O)."""
    with torch.no_grad():
        found = net.head(net.norm(torch.tensor(features, dtype=torch.float32)))
    said: FloatArray = found.double().numpy()
    return said


def trained(
    data: Universes, recipe: Recipe, count: int, seed: int, how: Training, kept: Kept
) -> hs.models.MultiscaleNet:
    """The recipe's network, its head trained on the first ``count`` training samples.

    Its weights are kept. So volumes that are simulated later are seen by networks that were
    finished before.
    """
    torch.manual_seed(seed)  # a head without a line begins with the network's own weights
    net = network(recipe, data.shape, outputs_for(data, how))
    about = {**asdict(how), "count": count, "data": data.learnt_from(count)}
    name = f"head-{count}-{seed}-{named(about)}"
    layer = line_of(data, count, how, kept) if how.line else None

    def fitted(how: Training) -> Arrays:
        train_head(net, data, count, seed, how, layer)
        return {key: value.numpy() for key, value in net.state_dict().items()}

    def tried() -> Trial:
        steps = (LOOKS, 3 * LOOKS)  # with as many looks as in all of them
        seconds = extrapolated(lambda some: fitted(replace(how, steps=some)), steps, how.steps)
        return Trial(seconds, {key: value.numpy() for key, value in net.state_dict().items()})

    cost = (how.degree, how.gaussian, how.steps, how.batch, how.members, how.plain, how.together)
    alike = ("head", count, len(data.features), data.shape, how.line, *cost)
    made = kept.arrays("heads", name, lambda: fitted(how), tried, alike)
    if {key: value.shape for key, value in net.state_dict().items()} != {
        key: value.shape for key, value in made.items()
    }:
        raise DataError(f"{kept.folder} has heads of another `model`; name another folder")
    net.load_state_dict({key: torch.from_numpy(value) for key, value in made.items()})
    return net.eval()


def outputs_of(
    data: Universes, recipe: Recipe, count: int, seed: int, how: Training, kept: Kept
) -> FloatArray:
    """What a trained network says of all samples (N, O)."""
    return said_of(trained(data, recipe, count, seed, how, kept), data.features)


def ridge_of(data: Universes, count: int, kept: Kept) -> tuple[FloatArray, list[list[Any]]]:
    """What the ridge says of all samples (N, P), and its choices."""
    everything = len(data.targets)

    def fitted(samples: int) -> Arrays:
        share = samples / everything
        split = {**data.split, "train": data.split["train"][:count]}
        some = {which: chosen[: math.ceil(share * len(chosen))] for which, chosen in split.items()}
        rows = np.sort(np.concatenate(list(some.values()))) if share < 1 else slice(None)
        if share < 1:
            some = {which: np.searchsorted(rows, chosen) for which, chosen in some.items()}
        sets = {name: numbers[rows] for name, numbers in data.sets.items()}
        ridge = fit_ridge(sets, data.targets[rows], some)
        return {"predicted": ridge.predicted, "chosen": np.array(json.dumps(ridge.chosen))}

    def tried() -> Trial:
        seconds = extrapolated(fitted, (1024, 4096), everything)  # eigenvectors are most of it
        off = data.targets + np.random.default_rng(0).normal(size=data.targets.shape)
        chosen = [[name, 1.0] for name in [*data.sets][-1:] * len(data.names)]
        return Trial(seconds, {"predicted": off, "chosen": np.array(json.dumps(chosen))})

    name = f"regression-{count}-{data.key}"
    alike = ("ridge", everything, tuple(one.shape[1] for one in data.sets.values()))
    made = kept.arrays("ridges", name, lambda: fitted(everything), tried, alike)
    return made["predicted"], json.loads(str(made["chosen"]))


def squares(data: Universes, predicted: FloatArray, split: str) -> FloatArray:
    """Squared errors (P + 1, V) of predictions (N, P), the last row that of their mean."""
    chosen = data.split[split]
    found = ((predicted - data.targets)[chosen] ** 2).T
    return np.concatenate([found, found.mean(0, keepdims=True)])


def compared(
    data: Universes,
    outputs: Sequence[FloatArray],
    ridge: FloatArray,
    count: int,
    best_ridge: FloatArray | None = None,
) -> dict[str, Any]:
    """Errors over the mean's and over the ridges', on test and validation samples."""
    names = [*data.names, "mean"]
    means = np.broadcast_to(data.targets[data.split["train"][:count]].mean(0), data.targets.shape)
    parameters = data.targets.shape[1]
    row: dict[str, Any] = {"universes": count, "seeds": len(outputs)}
    below = {"mean": means, "ridge": ridge}
    compares = [("network", "mean"), ("ridge", "mean"), ("network", "ridge")]
    if best_ridge is not None:
        below["best ridge"] = best_ridge
        compares.append(("network", "best ridge"))
    for split in ("test", "validation"):
        of = {
            "network": np.stack([squares(data, one[:, :parameters], split) for one in outputs], 1),
            "ridge": squares(data, ridge, split)[:, None],
        }
        for above, under in compares:
            pairs = zip(names, of[above], squares(data, below[under], split)[:, None], strict=True)
            row.setdefault(split, {})[f"{above} over {under}"] = {
                name: asdict(ratio_interval(one, other)) for name, one, other in pairs
            }
    return row


def coverages(data: Universes, ridge: FloatArray, outputs: FloatArray) -> dict[str, Any]:
    """How often intervals hold the true value of test samples, of a Gaussian network and the ridge.

    The ridge's errors have the covariance that they have over the validation samples. The
    network's covariances are its own; each deviation is multiplied by one number, with which the
    squared residuals of validation samples are 1 in the mean.
    """
    residuals = (ridge - data.targets)[data.split["validation"]]
    covariance = residuals.T @ residuals / len(residuals)
    mean, own = moments_of(outputs, len(data.names))
    assert own is not None
    off = (mean - data.targets)[data.split["validation"]]
    seen = standard_deviations(own[data.split["validation"]])
    factor = np.sqrt(np.mean((off / seen) ** 2, axis=0))
    found = {"levels": LEVELS_DRAWN, "factor": dict(zip(data.names, factor.tolist(), strict=True))}
    for name, means, spread in (
        ("ridge", ridge, np.broadcast_to(covariance, own.shape)),
        ("network", mean, own * factor[:, None] * factor),
        ("network, as it says", mean, own),
    ):
        test = data.split["test"]
        p = Predictions(
            Parameters.normalised(data.names),
            tuple(map(str, test)),
            data.targets[test],
            means[test],
            means[test].mean(0),
            covariance=np.ascontiguousarray(spread[test]),
        )
        each, joint = rank_statistics(p)
        drawn = {key: one.coverage(np.array(LEVELS_DRAWN)).tolist() for key, one in each.items()}
        together = joint.coverage(np.array(LEVELS_DRAWN)).tolist()
        found[name] = {**uncertainty_of(p), "drawn": {**drawn, "together": together}}
    return found


LEVELS_DRAWN = [level / 20 for level in range(1, 20)]
"""Of the intervals in a figure."""

LEVERS: Mapping[str, Training] = {
    "nothing": AS_SHIPPED,
    "targets alone, no products": Training(degree=1),
    "products of two targets": Training(degree=2),
    "one curve": Training(members=1, plain=0),
    "universes stay where they are": Training(moved=0.0),
    "features divided by their spread": Training(powers=(1.0,)),
    "all features for every target": Training(counts=()),
    "predictions of samples that the line has seen": Training(left_out=False),
    "the line goes on training": Training(together=True),
    "all of the head from random weights": Training(line=False, decay=0.1),
    "gaussian loss": Training(gaussian=True),
    "the last weights": Training(validated=False),
    "no average of weights": Training(average=0.0),
    "dropout of 0.2": Training(dropout=0.2),
    "weight decay of 0.1": Training(decay=0.1),
    "a third of the rate": Training(rate=3e-4),
    "three times the rate": Training(rate=3e-3),
    "a quarter of the steps": Training(steps=500),
    "twice the steps": Training(steps=4000),
    "four times the steps": Training(steps=8000),
}
"""What is changed alone."""


def work(
    recipe: Recipe, sizes: Sequence[int], seeds: Sequence[int], levers: bool, coverage: bool
) -> Callable[[Kept], dict[str, Any]]:
    """All that is measured, of what is kept."""

    def measure(kept: Kept) -> dict[str, Any]:
        data = universes_of(recipe, kept)
        largest = len(data.split["train"])
        if sizes and not 0 < min(sizes) <= max(sizes) <= largest:
            raise DataError(f"--sizes {sizes}: there are {largest} training samples")
        record: dict[str, Any] = {
            "splits": {which: len(chosen) for which, chosen in data.split.items()},
            "training": asdict(AS_SHIPPED),
            "rows": [],
            "levers": [],
        }

        def said(count: int, how: Training, seeds: Sequence[int]) -> list[FloatArray]:
            return [outputs_of(data, recipe, count, seed, how, kept) for seed in seeds]

        for count in sorted({*sizes, largest}):
            ridge, chosen = ridge_of(data, count, kept)
            best, of_best = ridge_of(with_first_features(data), count, kept)
            row = compared(data, said(count, AS_SHIPPED, seeds), ridge, count, best)
            row["chosen"] = dict(zip(data.names, chosen, strict=True))
            row["chosen by the best ridge"] = dict(zip(data.names, of_best, strict=True))
            record["rows"].append(row)
            show(row, f"{count}")
        for name, how in LEVERS.items() if levers else ():
            row = compared(data, said(largest, how, seeds[:1]), ridge, largest)
            record["levers"].append({"name": name, **row})
            show(row, name)
        if coverage:
            (gaussian,) = said(largest, replace(AS_SHIPPED, gaussian=True), seeds[:1])
            record["coverage"] = coverages(data, ridge, gaussian)
        return record

    return measure


def arguments() -> argparse.ArgumentParser:
    """What the programs of heads have in common."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the recipe")
    parser.add_argument(
        "--kept", type=Path, required=True, metavar="FOLDER", help="of all pieces of the work"
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="the record")
    parser.add_argument("--dry-run", action="store_true", help="only say what it will take")
    return parser


def record_planned(options: argparse.Namespace, measure: Callable[[Kept], dict[str, Any]]) -> None:
    """Say what the measurement will take; unless that is all, write its record."""
    about = {"machine": machine(), "command": " ".join(["python", *sys.argv])}
    record = run_planned(options.kept, measure, options.dry_run)
    if record is not None:
        write_json(options.json, {**about, **record})


def main() -> None:
    parser = arguments()
    parser.description = (__doc__ or "").split("\n")[0]
    parser.add_argument("--sizes", type=int, nargs="+", default=[], help="training samples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--levers", action="store_true", help="change each choice alone, too")
    parser.add_argument("--coverage", action="store_true", help="predict a covariance, too")
    parser.add_argument("--run", type=Path, help="the folder of a run with the network")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, [*ALONE, *options.overrides])
    measure = work(recipe, options.sizes, options.seeds, options.levers, options.coverage)
    record_planned(options, measure)
    if options.run is not None and not options.dry_run:
        kept = Kept(options.kept)
        data = universes_of(recipe, kept)
        net = trained(data, recipe, len(data.split["train"]), options.seeds[0], AS_SHIPPED, kept)
        hs.save(options.run / "checkpoints" / "head", net)
        save_recipe(recipe, options.run / "recipe.yaml")


def show(row: Mapping[str, Any], name: str) -> None:
    """A line of ratios to the ridge."""
    for split in ("validation", "test"):
        found = row[split]["network over ridge"].values()
        cells = (f"{one['value']:.3f} ({one['lower']:.3f} .. {one['upper']:.3f})" for one in found)
        print(f"{name:46}{split:12}", *cells, flush=True)


if __name__ == "__main__":
    main()
