"""What volume is worth to a network on statistics: whole universes against their sub-volumes.

    python benchmarks/subvolumes.py RECIPE --kept FOLDER [--widths W ...] [--seeds S ...] --json OUT
                                    [--dry-run]

The network is that of `head.py`, and FOLDER keeps its statistics and heads as there, of whole
volumes and of all cubes of W voxels that they are cut into; stopped, the program goes on where it
was, and ``--dry-run`` says how long what is missing will take, without further rates. It has no
batch norm. Configurations of the same training volumes:

- whole volumes;
- `W`: the cubes, each a sample with the targets of its volume; eight of each volume train, also if
  there are more. Mini-batches have eight times as many samples as those of whole volumes, so there
  are as many epochs and as many steps;
- `W, equal samples`: mini-batches have as many samples, so there are eight times as many steps;
- `statistics of W, averaged`: a volume's statistics are the mean of those of its cubes;
- whole volumes without power of modes longer than W, which the cubes lack, too: of their statistics
  only those are taken away, so that no edge is cut and no volume is lost.

Each has its own rate, that with the least error of validation samples over the ridge's, with the
first seed. The range of rates widens until the best one is inside. The linear layer of the head
leaves out volumes with all of their cubes, an eighth of them at a time.

Predictions of cubes count as such, averaged over their volume, and recalibrated by a line for each
target, which the validation volumes give. The control is a ridge on the same statistics: moments
and spectra of smoothed counts, those and power between channels, or all. The validation samples
choose one of the three and its strength for each target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from head import (
    ALONE,
    AS_SHIPPED,
    Training,
    Universes,
    arguments,
    features_of,
    outputs_of,
    record_planned,
    ridge_of,
    split_of,
    squares,
)
from kept import Kept
from numpy.typing import NDArray
from regression_control import FloatArray

import hyperslab as hs
from hyperslab.models.summary_statistics import (
    OctaveBins,
    pairs_of,
    smoothed_bins,
    smoothing_scales,
)
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train.builders import open_data
from hyperslab.train.metrics import fit_calibration, ratio_interval

RATES = (1e-3, 3e-3, 9e-3)
"""That every configuration tries; further ones are three times as large or as small."""

MOST_RATES = 12

OF_EACH = 8
"""The most parts of a volume that train, evenly chosen; all of them are predicted."""

SHARES = (2.5, 25, 50, 75, 97.5)
"""Percentiles of residuals, for a figure."""


def read_universes(recipe: Recipe, kept: Kept, width: int | None) -> Universes:
    """All volumes of a recipe, or the cubes that they are cut into, by the network's statistics."""
    with open_data(recipe, hs.Grid(), split="all") as data:
        source = data.source
        features = features_of(recipe, source, kept, width)
    parts = len(features) // len(source.names)
    listed = [source.target(volume) for volume in range(len(source.names))]
    some = np.arange(0, parts, max(1, parts // OF_EACH))
    split = {
        which: np.add.outer(volumes * parts, some if which == "train" else np.arange(parts)).ravel()
        for which, volumes in split_of(source, recipe, recipe.data.seed).items()
    }
    shape = (source.shape[0], *([width] * 3 if width else source.shape[1:]))
    targets = np.repeat(np.array(listed, dtype=np.float64), parts, axis=0)
    names = source.parameters.names
    return Universes(names, shape, targets, features, sets_of(features, shape), split, parts)


def sets_of(features: FloatArray, shape: Sequence[int]) -> dict[str, FloatArray]:
    """The sets of features, from the first on, between which ridge and head choose."""
    channels, width = shape[0], max(shape[1:])
    begins = 4 * channels + channels * sum(4 + bins for bins in bins_of_smoothed(width))
    between = begins + len(pairs_of(channels)) * OctaveBins(width).count
    sets = {"smoothed": begins, "pairs": between, "all": features.shape[1]}
    return {name: features[:, :count] for name, count in sets.items()}


def bins_of_smoothed(width: int) -> list[int]:
    """The bins of the spectra of smoothed fields, which have four moments each before them."""
    return [smoothed_bins(scale, width) for scale in smoothing_scales(width)]


def by_volume(values: FloatArray, parts: int) -> FloatArray:
    """The means (N / parts, ...) of values (N, ...) of the parts of each volume."""
    means: FloatArray = values.reshape(-1, parts, *values.shape[1:]).mean(1)
    return means


@lru_cache(maxsize=1)
def volumes_of(data: Universes) -> Universes:
    """The volumes of which ``data`` has parts; their features are the means of those."""
    features = by_volume(data.features, data.parts)
    volumes = {which: chosen // data.parts for which, chosen in data.split.items()}
    return replace(
        data,
        targets=data.targets[:: data.parts],
        features=features,
        sets=sets_of(features, data.shape),
        split={which: all_[np.diff(all_, prepend=-1) != 0] for which, all_ in volumes.items()},
        parts=1,
    )


def without_long_modes(data: Universes, width: int) -> Universes:
    """The same volumes without the power and correlation of modes longer than ``width`` voxels.

    Nor have they the moments of smoothed fields, which such modes make. Their columns are 0, so
    that the network is the same.
    """
    channels, *extents = data.shape
    whole = max(extents)
    long = round(3 * math.log2(whole / width))

    def long_bins(place: int, fields: int, bins: int) -> NDArray[np.intp]:
        spectra = place + bins * np.arange(fields)
        return np.add.outer(spectra, np.arange(min(long, bins))).ravel()

    columns, place = [], 4 * channels
    for bins in bins_of_smoothed(whole):
        columns += [
            place + np.arange(4 * channels),
            long_bins(place + 4 * channels, channels, bins),
        ]
        place += (4 + bins) * channels
    columns.append(long_bins(place, 2 * len(pairs_of(channels)), OctaveBins(whole).count))
    features = data.features.copy()
    features[:, np.concatenate(columns)] = 0
    return replace(data, features=features, sets=sets_of(features, data.shape))


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is trained on what; ``ridge``: that on the same data is to be shown, too."""

    name: str
    data: Universes
    how: Training
    ridge: bool = True


def configurations(recipe: Recipe, kept: Kept, widths: Sequence[int]) -> Iterator[Configuration]:
    """The whole first, then those of each width."""
    whole = read_universes(recipe, kept, None)
    name = str(whole.shape[-1])
    counts = tuple(one.shape[1] for one in whole.sets.values())
    how = replace(AS_SHIPPED, counts=counts)
    yield Configuration(name, whole, how)
    for width in widths:
        short = without_long_modes(whole, width)
        yield Configuration(f"{name}, no modes longer than {width}", short, how)
    for width in widths:
        data = read_universes(recipe, kept, width)
        counts = tuple(one.shape[1] for one in data.sets.values())
        how, many = replace(AS_SHIPPED, counts=counts), min(data.parts, OF_EACH)
        yield Configuration(f"{width}", data, replace(how, batch=how.batch * many))
        yield Configuration(f"statistics of {width}, averaged", volumes_of(data), how)
        more = replace(how, steps=how.steps * many)
        yield Configuration(f"{width}, equal samples", data, more, ridge=False)


def rated(
    error: Callable[[float], float], known: Callable[[], bool] = lambda: True
) -> dict[float, float]:
    """Errors by rate, of `RATES` and of further ones until the best is inside.

    Errors that are not ``known``, as in a plan, choose no further rate.
    """
    found = {rate: error(rate) for rate in RATES}
    while known() and len(found) < MOST_RATES:
        best = min(found, key=found.__getitem__)
        if min(found) < best < max(found):
            break
        rate = best / 3 if best == min(found) else best * 3
        found[rate] = error(rate)
    return dict(sorted(found.items()))


def treated(data: Universes, predicted: FloatArray) -> dict[str, tuple[Universes, FloatArray]]:
    """What is made of the predictions (N, P) of parts, and whose predictions it is."""
    found = {"": (data, predicted)}
    if data.parts > 1:
        whole, means = volumes_of(data), by_volume(predicted, data.parts)
        seen = whole.split["validation"]
        lines = fit_calibration(means[seen], whole.targets[seen])
        found[", averaged"] = whole, means
        found[", averaged and recalibrated"] = whole, lines(means)
    return found


@dataclass(frozen=True, slots=True)
class Scored:
    """Squared errors (P + 1, S, V) of test volumes, and the residuals (N, P) of a median seed."""

    name: str
    width: int
    control: bool
    errors: FloatArray
    residuals: FloatArray


def scored(name: str, data: Universes, seeds: Sequence[FloatArray], control: bool) -> list[Scored]:
    """The predictions (N, P) of each seed, by what is made of them."""
    found = []
    made = [treated(data, predicted) for predicted in seeds]
    for what in made[0]:
        of, _ = made[0][what]
        each = [by_volume(squares(of, one[what][1], "test").T, of.parts).T for one in made]
        order = np.argsort([one[-1].mean() for one in each])
        _, predicted = made[order[len(order) // 2]][what]
        off = (predicted - of.targets)[of.split["test"]]
        found.append(Scored(name + what, of.shape[-1], control, np.stack(each, 1), off))
    return found


def numbers_of(one: Scored, whole: Scored, of_mean: FloatArray, names: Sequence[str]) -> Any:
    """A row of the record: errors over those of the mean (P + 1, 1, V) and of whole volumes."""

    def over(below: FloatArray) -> dict[str, Any]:
        pairs = zip(names, one.errors, below, strict=True)
        return {name: asdict(ratio_interval(above, under)) for name, above, under in pairs}

    by_seed = one.errors.mean(2) / of_mean.mean(2)
    residuals = np.percentile(one.residuals, SHARES, axis=0).T
    return {
        "name": one.name,
        "width": one.width,
        "control": one.control,
        "seeds": one.errors.shape[1],
        "ratio": over(of_mean),
        "ratio_by_seed": dict(zip(names, by_seed.tolist(), strict=True)),
        "to_reference": dict.fromkeys(names) if one is whole else over(whole.errors),
        "residuals": dict(zip(names[:-1], residuals.tolist(), strict=True)),
    }


def trained(
    recipe: Recipe, kept: Kept, one: Configuration, seeds: Sequence[int]
) -> tuple[list[FloatArray], FloatArray, dict[str, Any]]:
    """What network, for each seed at its best rate, and ridge say of all samples; the facts."""
    data, count = one.data, len(one.data.split["train"])
    before = kept.missing
    ridge, chosen = ridge_of(data, count, kept)
    least = squares(data, ridge, "validation")[:-1].mean(1)

    def said(rate: float, seed: int) -> FloatArray:
        return outputs_of(data, recipe, count, seed, replace(one.how, rate=rate), kept)

    def error(rate: float) -> float:
        found = squares(data, said(rate, seeds[0]), "validation")[:-1].mean(1)
        print(f"{one.name}, rate {rate:.2g}:", *(found / least).round(3), flush=True)
        return float(np.mean(found / least))

    rates = rated(error, known=lambda: kept.missing == before)
    rate = min(rates, key=rates.__getitem__)
    facts = {
        "name": one.name,
        "samples": count,
        "features": data.features.shape[1],
        "batch": one.how.batch,
        "steps": one.how.steps,
        "rates": [{"rate": rate, "validation": found} for rate, found in rates.items()],
        "rate": rate,
        "inside": min(rates) < rate < max(rates),
        "ridge": dict(zip(data.names, chosen, strict=True)),
    }
    return [said(rate, seed) for seed in seeds], ridge, facts


def compare(recipe: Recipe, widths: Sequence[int], seeds: Sequence[int], kept: Kept) -> Any:
    """The record of all configurations."""
    networks: list[Scored] = []
    ridges: list[Scored] = []
    about: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    for one in configurations(recipe, kept, widths):
        said, ridge, facts = trained(recipe, kept, one, seeds)
        about.append(facts)
        networks += scored(one.name, one.data, said, control=False)
        if one.ridge:
            ridges += scored(f"ridge, {one.name}", one.data, [ridge], control=True)
        if not record:
            data = one.data
            middle = data.targets[data.split["train"]].mean(0)
            of_mean = squares(data, np.broadcast_to(middle, data.targets.shape), "test")[:, None]
            record = {
                "parameters": data.names,
                "reference": one.name,
                "splits": {which: len(chosen) for which, chosen in data.split.items()},
                "training": asdict(AS_SHIPPED),
                "shares": SHARES,
            }
    names = [*record["parameters"], "mean"]
    rows = [numbers_of(one, kind[0], of_mean, names) for kind in (networks, ridges) for one in kind]
    for row in rows:
        cells = (f"{one['value']:.3g}" for one in row["ratio"].values())
        print(f"{row['name']:56}", *cells)
    return {**record, "configurations": about, "rows": rows}


def main() -> None:
    parser = arguments()
    parser.description = (__doc__ or "").split("\n")[0]
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 16], help="[voxels] of cubes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, [*ALONE, *options.overrides])
    record_planned(options, lambda kept: compare(recipe, options.widths, options.seeds, kept))


if __name__ == "__main__":
    main()
