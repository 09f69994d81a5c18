"""What is left to be known of parameters after a network's summary: posteriors by a flow.

    python benchmarks/posterior.py RECIPE [key=value ...] --kept FOLDER --json OUT
                                   [--seeds S ...] [--dry-run]

The network is that of `head.py`, with the same kept pieces, and its predictions are the summary of
a volume. A normalizing flow (`zuko`: neural splines, Durkan et al. 2019) learns the distribution
of the parameters for each summary, of which no Gaussian is asked. It learns from what is said of
training samples by networks that have not seen them: each tenth of them by a network of the other
nine, which is nearly as good as that of all. The ridge's predictions get a flow of their own in the
same way. Validation samples choose how long a flow trains.

Whether posteriors are right is measured by ranks of the true values among samples of the posterior
(Talts et al. 2018) on test samples, by parameter, and for all together by the share of posterior
samples that are more probable than the true values. Networks and flows of each seed are others, and
so are these probabilities; the first seed's posteriors are recorded whole.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import zuko
from head import (
    AS_SHIPPED,
    LEVELS_DRAWN,
    Training,
    Universes,
    arguments,
    digest,
    named,
    outputs_of,
    record_planned,
    ridge_of,
    universes_of,
)
from kept import Arrays, Kept, Trial, seconds_of
from numpy.typing import NDArray
from regression_control import FloatArray
from ridge import ALONE

from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train.uncertainty import RankStatistics, levels_of

# To import zuko ends the checks of torch's distributions for the whole process.
torch.distributions.Distribution.set_default_validate_args(__debug__)

FOLDS = 10
SAMPLES = 1000
"""Of each posterior."""

NEAREST = 1e-4
"""To the walls of the box, as a share of it: the flow's own variable is finite."""


def summaries(
    data: Universes, recipe: Recipe, seed: int, how: Training, kept: Kept
) -> dict[str, FloatArray]:
    """What network and ridge say of all samples (N, P), none of which they were trained on."""
    train = data.split["train"]
    ridge, chosen = ridge_of(data, len(train), kept)
    found = {"network": outputs_of(data, recipe, len(train), seed, how, kept), "ridge": ridge}
    sets = {name: data.sets[name] for name, _ in chosen}  # those that were best for all of them
    for fold in range(FOLDS):
        own = train[fold::FOLDS]
        rest = np.setdiff1d(train, own)
        part = replace(data, split={**data.split, "train": rest}, sets=sets)
        found["network"][own] = outputs_of(part, recipe, len(rest), seed, how, kept)[own]
        found["ridge"][own] = ridge_of(part, len(rest), kept)[0][own]
    return found


@dataclass(frozen=True, slots=True)
class Fitting:
    """How a flow is trained."""

    transforms: int = 2
    hidden: tuple[int, ...] = (64, 64)
    epochs: int = 30
    batch: int = 128
    rate: float = 1e-3
    decay: float = 1e-4


class Posterior:
    """The distribution of targets (N, P) in a box for each summary (N, S), as a flow learns it.

    The flow's variable is the normal quantile of a target's place in the box: targets that are
    drawn evenly from it are normal, which a flow is before it has learnt anything.
    """

    def __init__(self, summary: FloatArray, y: FloatArray, box: tuple[float, float]) -> None:
        self.middle, self.width = summary.mean(0), summary.std(0)
        self.low, self.high = box
        self.count = y.shape[1]
        self.flow: torch.nn.Module = torch.nn.Identity()

    def context(self, summary: FloatArray) -> torch.Tensor:
        return torch.tensor((summary - self.middle) / self.width, dtype=torch.float32)

    def variable(self, y: FloatArray) -> torch.Tensor:
        place = ((y - self.low) / (self.high - self.low)).clip(NEAREST, 1 - NEAREST)
        return torch.special.ndtri(torch.from_numpy(place)).float()

    def fit(
        self,
        train: tuple[FloatArray, FloatArray],
        validation: tuple[FloatArray, FloatArray],
        seed: int,
        how: Fitting,
    ) -> float:
        """Train on summaries and targets; keep the epoch that was best in validation, and say it.

        Returns the validation samples' mean negative log density in the flow's variable.
        """
        torch.manual_seed(seed)
        flow = zuko.flows.NSF(
            self.count, len(self.middle), transforms=how.transforms, hidden_features=how.hidden
        )
        optimizer = torch.optim.AdamW(flow.parameters(), lr=how.rate, weight_decay=how.decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.epochs)
        c, u = self.context(train[0]), self.variable(train[1])
        other_c, other_u = self.context(validation[0]), self.variable(validation[1])
        least, best = math.inf, copy.deepcopy(flow)
        for _ in range(how.epochs):
            flow.train()
            for chosen in torch.randperm(len(c)).split(how.batch):
                optimizer.zero_grad()
                loss = -flow(c[chosen]).log_prob(u[chosen]).mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
                optimizer.step()
            schedule.step()
            flow.eval()
            with torch.no_grad():
                found = -float(flow(other_c).log_prob(other_u).mean())
            if found < least:
                least, best = found, copy.deepcopy(flow)
        self.flow = best.eval()
        return least

    def ranks(self, summary: FloatArray, y: FloatArray, seed: int) -> tuple[FloatArray, FloatArray]:
        """Return ranks of targets (N, P) among posterior samples, and levels (N,) of all together.

        A level is the share of posterior samples that are more probable than the targets.
        """
        torch.manual_seed(seed)
        c, u = self.context(summary), self.variable(y)
        ranks, levels = [], []
        with torch.no_grad():
            for some, true in zip(c.split(64), u.split(64), strict=True):
                posterior = self.flow(some)
                drawn, density = posterior.rsample_and_log_prob((SAMPLES,))
                ranks.append((drawn < true).double().mean(0).numpy())
                levels.append((density > posterior.log_prob(true)).double().mean(0).numpy())
        return np.concatenate(ranks), np.concatenate(levels)


def calibration(names: tuple[str, ...], ranks: FloatArray, joint: FloatArray) -> dict[str, Any]:
    """Facts of ranks (N, P) and levels (N,) as of `uncertainty_of`, and the curve of coverage."""
    each = {
        name: RankStatistics(own, levels_of(own), math.nan)
        for name, own in zip(names, ranks.T, strict=True)
    }
    together = RankStatistics(joint, joint, math.nan)

    def facts(one: RankStatistics) -> dict[str, Any]:
        return {key: value for key, value in one.facts(len(joint)).items() if "square" not in key}

    drawn = {name: one.coverage(np.array(LEVELS_DRAWN)).tolist() for name, one in each.items()}
    return {
        "volumes": len(joint),
        "parameters": {name: facts(one) for name, one in each.items()},
        "joint": facts(together),
        "drawn": {**drawn, "together": together.coverage(np.array(LEVELS_DRAWN)).tolist()},
    }


def ranked(
    data: Universes, summary: FloatArray, seed: int, how: Fitting, kept: Kept
) -> dict[str, NDArray[Any]]:
    """Ranks and levels of validation and test samples by a flow, and how it fits the former."""
    pairs = {which: (summary[own], data.targets[own]) for which, own in data.split.items()}

    def fitted(how: Fitting, samples: int | None = None) -> Arrays:
        posterior = Posterior(*pairs["train"], (-1, 1))
        loss = posterior.fit(pairs["train"], pairs["validation"], seed, how)
        found = {"loss": np.array(loss)}
        for which in ("validation", "test"):
            some = (one[:samples] for one in pairs[which])
            found[f"ranks, {which}"], found[f"levels, {which}"] = posterior.ranks(*some, seed)
        return found

    def tried() -> Trial:
        few = 64
        one = seconds_of(lambda: fitted(replace(how, epochs=1), few))
        fit = seconds_of(lambda: fitted(replace(how, epochs=2), few)) - one
        more = seconds_of(lambda: fitted(replace(how, epochs=1), 2 * few)) - one
        others = sum(len(pairs[which][0]) for which in ("validation", "test"))
        seconds = one + max(fit, 0.0) * (how.epochs - 1)
        seconds += max(more, 0.0) * (others - 2 * few) / (2 * few)
        random = np.random.default_rng(0)
        shapes = {"ranks": data.targets.shape[1:], "levels": ()}
        arrays = {
            f"{key}, {which}": random.random((len(pairs[which][0]), *shape))
            for which in ("validation", "test")
            for key, shape in shapes.items()
        }
        return Trial(seconds, {"loss": np.array(0.0), **arrays})

    about = {**asdict(how), "data": digest((summary, data.targets, *data.split.values()))}
    alike = ("flow", how, summary.shape, *map(len, data.split.values()))
    name = f"posterior-{seed}-{named(about)}"
    return kept.arrays("flows", name, lambda: fitted(how), tried, alike)


def posteriors(
    data: Universes, said: Mapping[str, FloatArray], seed: int, how: Fitting, kept: Kept
) -> dict[str, Any]:
    """By summary, how its flow fits validation samples, and how calibrated it is on these and test.

    Raises:
        ValueError: there are targets outside of the box of -1 to 1.
    """
    if np.abs(data.targets).max() > 1:
        raise ValueError("targets lie in a box of -1 to 1, as of `hyperslab simulate`")
    found: dict[str, Any] = {}
    for name, summary in said.items():
        ranks = ranked(data, summary, seed, how, kept)
        loss = float(ranks["loss"])
        found[name] = {"validation_loss": loss}
        for which in ("validation", "test"):
            of = (ranks[f"{key}, {which}"] for key in ("ranks", "levels"))
            found[name][which] = calibration(data.names, *of)
            show(f"{name}, {which}, {loss:.3f}", found[name][which])
    return found


def show(name: str, measured: Mapping[str, Any]) -> None:
    """A line of coverages and of the probability of such ranks."""
    rows = [*measured["parameters"].values(), measured["joint"]]
    cells = (
        f"{100 * row['coverage_68']:.0f} {100 * row['coverage_95']:.0f} {row['ks_probability']:.2f}"
        for row in rows
    )
    print(f"{name:30}", *cells, sep=" | ", flush=True)


def work(recipe: Recipe, seeds: Sequence[int], kept: Kept) -> dict[str, Any]:
    """The record of network and ridge."""
    data = universes_of(recipe, kept)
    fitting = Fitting()
    found = []
    for seed in seeds:
        said = summaries(data, recipe, seed, AS_SHIPPED, kept)
        found.append(posteriors(data, said, seed, fitting, kept))
    return {
        "splits": {which: len(chosen) for which, chosen in data.split.items()},
        "training": asdict(AS_SHIPPED),
        "flow": asdict(fitting),
        "levels": LEVELS_DRAWN,
        "summaries": found[0],
        "seeds": [
            {"seed": seed, **probabilities(one)} for seed, one in zip(seeds, found, strict=True)
        ],
    }


def probabilities(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By summary, the probability of ranks as uneven as those of test samples."""
    return {
        name: {
            **{key: row["ks_probability"] for key, row in one["test"]["parameters"].items()},
            "together": one["test"]["joint"]["ks_probability"],
        }
        for name, one in found.items()
    }


def main() -> None:
    parser = arguments()
    parser.description = (__doc__ or "").split("\n")[0]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, [*ALONE, *options.overrides])
    record_planned(options, lambda kept: work(recipe, options.seeds, kept))


if __name__ == "__main__":
    main()
