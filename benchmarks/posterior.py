"""What is left to be known of parameters after a network's summary: posteriors by a flow.

    python benchmarks/posterior.py RECIPE [key=value ...] --kept FOLDER --json OUT [--seed S]

The network is that of `head.py`, with the same kept statistics, and its predictions are the summary
of a volume. A normalizing flow (`zuko`: neural splines, Durkan et al. 2019) learns the distribution
of the parameters for each summary, of which no Gaussian is asked. It learns from what is said of
training samples by networks that have not seen them: each tenth of them by a network of the other
nine, which is nearly as good as that of all. The ridge's predictions get a flow of their own in the
same way. Validation samples choose how long a flow trains.

Whether posteriors are right is measured by ranks of the true values among samples of the posterior
(Talts et al. 2018) on test samples, by parameter, and for all together by the share of posterior
samples that are more probable than the true values.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zuko
from clock import machine
from head import (
    AS_SHIPPED,
    LEVELS_DRAWN,
    Training,
    Universes,
    outputs_of,
    ridge_of,
    universes_of,
)
from regression_control import FloatArray
from ridge import ALONE

from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train.uncertainty import RankStatistics, levels_of
from hyperslab.util.atomic_files import write_json

# To import zuko ends the checks of torch's distributions for the whole process.
torch.distributions.Distribution.set_default_validate_args(__debug__)

FOLDS = 10
SAMPLES = 1000
"""Of each posterior."""

NEAREST = 1e-4
"""To the walls of the box, as a share of it: the flow's own variable is finite."""


def summaries(
    data: Universes, recipe: Recipe, seed: int, how: Training, folder: Path
) -> dict[str, FloatArray]:
    """What network and ridge say of all samples (N, P), none of which they were trained on."""
    train = data.split["train"]
    ridge, chosen = ridge_of(data, len(train), folder)
    found = {"network": outputs_of(data, recipe, len(train), seed, how, folder), "ridge": ridge}
    sets = {name: data.sets[name] for name, _ in chosen}  # those that were best for all of them
    for fold in range(FOLDS):
        own = train[fold::FOLDS]
        rest = np.setdiff1d(train, own)
        part = replace(data, split={**data.split, "train": rest}, sets=sets)
        found["network"][own] = outputs_of(part, recipe, len(rest), seed, how, folder)[own]
        found["ridge"][own] = ridge_of(part, len(rest), folder)[0][own]
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


def posteriors(
    data: Universes, said: Mapping[str, FloatArray], seed: int, how: Fitting
) -> dict[str, Any]:
    """By summary, how its flow fits validation samples, and how calibrated it is on these and test.

    Raises:
        ValueError: there are targets outside of the box of -1 to 1.
    """
    if np.abs(data.targets).max() > 1:
        raise ValueError("targets lie in a box of -1 to 1, as of `hyperslab simulate`")
    found: dict[str, Any] = {}
    split = data.split
    for name, summary in said.items():
        pairs = {which: (summary[own], data.targets[own]) for which, own in split.items()}
        posterior = Posterior(*pairs["train"], (-1, 1))
        loss = posterior.fit(pairs["train"], pairs["validation"], seed, how)
        found[name] = {"validation_loss": loss}
        for which in ("validation", "test"):
            measured = calibration(data.names, *posterior.ranks(*pairs[which], seed))
            found[name][which] = measured
            show(f"{name}, {which}, {loss:.3f}", measured)
    return found


def show(name: str, measured: Mapping[str, Any]) -> None:
    """A line of coverages and of the probability of such ranks."""
    rows = [*measured["parameters"].values(), measured["joint"]]
    cells = (
        f"{100 * row['coverage_68']:.0f} {100 * row['coverage_95']:.0f} {row['ks_probability']:.2f}"
        for row in rows
    )
    print(f"{name:30}", *cells, sep=" | ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kept", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, [*ALONE, *options.overrides])
    data = universes_of(recipe, options.kept)
    said = summaries(data, recipe, options.seed, AS_SHIPPED, options.kept)
    fitting = Fitting()
    record = {
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]),
        "splits": {which: len(chosen) for which, chosen in data.split.items()},
        "training": asdict(AS_SHIPPED),
        "flow": asdict(fitting),
        "levels": LEVELS_DRAWN,
        "summaries": posteriors(data, said, options.seed, fitting),
    }
    write_json(options.json, record)


if __name__ == "__main__":
    main()
