"""Reads a sweep file: the keys it may have, and every run it asks for, with its recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    field_validator,
)

from hyperslab.errors import DataError, LayoutError, RecipeError
from hyperslab.recipe import load
from hyperslab.recipe.compare import settings_of, value_at
from hyperslab.recipe.schedule import TargetSchedule
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.section import Section, UserPath
from hyperslab.recipe.trust import output_of_run, trust_of
from hyperslab.util.atomic_files import check_links

SWEPT = {
    **dict.fromkeys(load.RATE_KEYS, "give rates in the sweep's file"),
    "seed": "give seeds in the sweep's file",
    "output": "give --output, or output in the sweep's file",
}
"""Names the keys of a recipe that a sweep sets itself, each with what a user does instead."""


def _different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values or len(set(values)) < len(values):
        raise ValueError("give at least one value, and none twice")
    return values


Rates = Annotated[tuple[PositiveFloat, ...], AfterValidator(_different)]
Seeds = Annotated[tuple[NonNegativeInt, ...], AfterValidator(_different)]


class VariantSection(Section):
    """Holds the keys of the recipe that differ, dotted, with their values.

    ``rates`` and ``seeds`` take the place of the sweep's.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    rates: Rates | None = None
    seeds: Seeds | None = None

    @property
    def keys(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ChoiceSection(Section):
    """Says how the learning rate of a variant is chosen, by shorter runs' validation loss."""

    epochs: Annotated[float, Field(gt=0, le=1)] = 1 / 3  # share of the recipe's
    seeds: Seeds | None = None  # None: the variant's first
    # decades beyond the given rates; more of them are tried while the best is the last at one end
    widen: Annotated[int, Field(ge=0, le=6)] = 0
    # epochs after which the worse half of a variant's rates is stopped, again after twice as many,
    # and so on; 0: all rates are trained to the end
    halve: NonNegativeInt = 0


class SweepFile(Section):
    """Declares the keys of a sweep file."""

    recipe: UserPath  # relative to the sweep file
    variants: dict[str, VariantSection]
    rates: Rates
    seeds: Seeds
    choose: ChoiceSection = ChoiceSection()
    # the folder of all runs; None: runs/ and the file's name. In a run's folder it says nothing.
    output: UserPath | None = None

    @field_validator("variants")
    @classmethod
    def _named(cls, variants: dict[str, VariantSection]) -> dict[str, VariantSection]:
        if not variants:
            raise ValueError("give at least one variant; one without changes is NAME: {}")
        for name, variant in variants.items():
            if not re.fullmatch(r"\w[\w .+=,²³-]*", name):
                raise ValueError(f"variant {name!r}: a folder will have this name")
            if problem := _swept_key(variant.keys):
                raise ValueError(f"variant {name!r}: {problem}")
        return variants


def _swept_key(keys: Mapping[str, Any]) -> str:
    """Say which of these dotted keys, or one in their sections, a sweep sets; "" if none."""
    values: dict[str, Any] = {}
    for key, value in keys.items():
        load.put_override(values, key, value)
    found = next((key for key in SWEPT if value_at(values, key) is not None), None)
    return "" if found is None else f"{found} is set by the sweep itself\n    {SWEPT[found]}"


IRRELEVANT_SECTIONS = frozenset({"grid", "memory", "peak"})
"""Lists the sections on which the result of a run does not depend."""


@dataclass(frozen=True, slots=True)
class SweepRun:
    """Holds a variant's training at a rate, with a seed; ``chooses``: to choose the rate.

    It is wanted ``until`` so many epochs are done for now, where that is said.
    """

    variant: str
    rate: float
    seed: int
    chooses: bool
    recipe: Recipe = field(compare=False)
    until: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        of = f"{self.variant}, rate {self.rate:g}, seed {self.seed}"
        return f"{of} (choosing the rate)" if self.chooses else of

    @property
    def folder(self) -> Path:
        return self.recipe.output

    @property
    def epochs(self) -> int:
        return self.until or self.recipe.epochs


@dataclass(frozen=True, slots=True)
class SweepVariant:
    """Holds a variant: its recipe at no particular rate, and what is to be run of it."""

    name: str
    recipe: Recipe
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    choosing_seeds: tuple[int, ...]

    @property
    def choosing_runs(self) -> int:
        """Counts the runs that choose the rate: none where there is one rate only."""
        return len(self.rates) * len(self.choosing_seeds) if len(self.rates) > 1 else 0

    def beyond(self, best: float) -> float | None:
        """Return the next rate on the side where the best one is the last; None if it is not.

        It is as far from the best one as that from its neighbour.
        """
        ordered = sorted(self.rates)
        if len(ordered) < 2 or best not in (ordered[0], ordered[-1]):
            return None
        neighbour = ordered[1] if best == ordered[0] else ordered[-2]
        return float(f"{best * best / neighbour:.3g}")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Holds all that is to be run, into ``output``; ``share`` of the epochs chooses a rate.

    ``widen`` is the number of decades beyond the given rates in which others are tried; ``halve``
    are the epochs after which the worse half of the rates is stopped for the first time, or 0.
    """

    output: Path
    variants: tuple[SweepVariant, ...]
    share: float
    widen: int = 0
    halve: int = 0

    def rungs(self, variant: SweepVariant) -> list[tuple[int, int]]:
        """List after how many epochs the rates of a variant are compared, and how many get there.

        The last ones are trained to the end. As in Li et al. 2018 (Hyperband), algorithm 1, the
        inner loop with η = 2: each rung has twice the epochs and half the rates, rounded up.
        """
        epochs = shortened(variant.recipe, self.share).epochs
        count = len(variant.rates)
        found = []
        rung = self.halve
        while 0 < rung < epochs and count > 1:
            found.append((rung, count))
            rung, count = 2 * rung, -(-count // 2)
        return [*found, (epochs, count)]

    def planned_epochs(self, variant: SweepVariant) -> tuple[int, int]:
        """Count the epochs of all of a variant's runs that choose, and of all its seeds."""
        choosing = before = 0
        for epochs, rates in self.rungs(variant) if variant.choosing_runs else ():
            choosing += (epochs - before) * rates * len(variant.choosing_seeds)
            before = epochs
        return choosing, variant.recipe.epochs * len(variant.seeds)

    def widest(self) -> Sweep:
        """Return this sweep with all rates that widening may try if things go as they can."""
        sides = []
        for edge in (min, max):
            wide = self
            while True:
                best = {variant.name: edge(variant.rates) for variant in wide.variants}
                if (wider := wide.wider(self, best)) == wide:
                    break
                wide = wider
            sides.append(wide.variants)
        longer = [max(pair, key=lambda one: len(one.rates)) for pair in zip(*sides, strict=True)]
        return replace(self, variants=tuple(longer))

    def wider(self, given: Sweep, best: Mapping[str, float]) -> Sweep:
        """Return this sweep with one rate more for each variant whose best is the last on a side.

        ``given`` is the sweep before it was widened; ``best`` are rates by variant.
        """
        variants = []
        for variant, before in zip(self.variants, given.variants, strict=True):
            rate = variant.beyond(best[variant.name]) if variant.name in best else None
            reach = 1.0001 * 10.0**self.widen  # rates have three digits
            if rate and min(before.rates) / reach <= rate <= max(before.rates) * reach:
                variant = replace(variant, rates=tuple(sorted({*variant.rates, rate})))
            variants.append(variant)
        return replace(self, variants=tuple(variants))

    def choosing(self) -> list[SweepRun]:
        """Lists the runs that choose the rates, variant by variant."""
        return [
            self._run(variant, rate, seed, chooses=True)
            for variant in self.variants
            if variant.choosing_runs
            for rate in variant.rates
            for seed in variant.choosing_seeds
        ]

    def final(self, rates: Mapping[str, float]) -> list[SweepRun]:
        """Lists the runs at the chosen rates, the first seed of all variants first.

        So variants can be compared before all seeds are done. One without a rate has no runs.
        """
        most = max(len(variant.seeds) for variant in self.variants)
        return [
            self._run(variant, rates[variant.name], variant.seeds[place], chooses=False)
            for place in range(most)
            for variant in self.variants
            if place < len(variant.seeds) and variant.name in rates
        ]

    def settings(self) -> dict[str, Any]:
        """Lists what the results depend on, as plain values."""
        return {
            "choose": {
                "epochs": self.share,
                **({"widen": self.widen} if self.widen else {}),
                **({"halve": self.halve} if self.halve else {}),
            },
            "variants": {
                variant.name: {
                    "rates": list(variant.rates),
                    "seeds": list(variant.seeds),
                    "choosing_seeds": list(variant.choosing_seeds),
                    "recipe": settings_of(variant.recipe, but=IRRELEVANT_SECTIONS),
                }
                for variant in self.variants
            },
        }

    def _run(self, variant: SweepVariant, rate: float, seed: int, *, chooses: bool) -> SweepRun:
        stage = "choose-" if chooses else ""
        folder = self.output / variant.name / f"{stage}rate-{rate:g}-seed-{seed}"
        optimizer = variant.recipe.optimizer.model_copy(update={"learning_rate": rate})
        recipe = variant.recipe.model_copy(
            update={"optimizer": optimizer, "seed": seed, "output": folder}
        )
        if chooses:
            recipe = shortened(recipe, self.share)
        return SweepRun(variant.name, rate, seed, chooses, recipe)


def load_sweep(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    output: Path | None = None,
    trusted: Sequence[str] = (),
) -> Sweep:
    """Loads the sweep in a YAML file; ``overrides`` are of the recipe, for all variants.

    ``trusted`` are modules whose classes it may name where it is a run's, see `trust_of`.

    Raises:
        RecipeError: the file, the recipe, a variant or an override is wrong; says where.
    """
    path = Path(path)
    file = _read_sweep_file(path)
    if problem := _swept_key(dict(map(load.parse_override, overrides))):
        raise RecipeError(f"override: {problem}")
    base = path.parent / file.recipe
    trust = trust_of(base, trusted)
    by_user = trust_of(path).own
    folder = output or (file.output if by_user else output_of_run(path)) or Path("runs") / path.stem
    if not by_user and output is None:
        check_links(path.parent, folder.name)
    if not by_user:
        trust = replace(trust, own=False, file=str(path))
    variants = []
    for name, section in file.variants.items():
        own = [f"{key}={json.dumps(value)}" for key, value in section.keys.items()]
        words, varied = ([*overrides, *own], []) if by_user else (overrides, own)
        try:
            recipe = load.load_recipe(base, words, varied=varied, trust=trust)
            recipe.check_extents()
            variant = _variant(name, section, file, recipe)
            if variant.choosing_runs:
                shortened(recipe, file.choose.epochs)  # refuses steps that it has no place for
            variants.append(variant)
        except RecipeError as error:
            raise RecipeError(f"{path}, variant {name!r}: {error}") from None
    choose = file.choose
    sweep = Sweep(folder, tuple(variants), choose.epochs, choose.widen, choose.halve)
    several = [variant for variant in variants if variant.choosing_runs]
    if choose.halve and all(len(sweep.rungs(variant)) == 1 for variant in several):
        raise RecipeError(
            f"{path}: choose.halve={choose.halve} stops no run: no variant has several rates that "
            "are tried in more epochs\n    leave it out, or choose in more: choose.epochs"
        )
    return sweep


def check_variant(variant: SweepVariant) -> None:
    """Refuses a variant that could not be trained and evaluated on its data, as far as is known.

    Raises:
        RecipeError: it is of other volumes than its data hold, or of uncuttable ones.
        DataError: there are no data to train, validate or test on.
    """
    data = variant.recipe.data
    if not data.is_here:
        return  # its runs will say so
    from hyperslab.data.sampler import SPLITS  # numpy
    from hyperslab.formats.views import selected
    from hyperslab.train.samples import samples_of_split

    source = data.whole_volumes()
    if data.shape and not source.shapes and data.shape[1:] != tuple(source.shape[1:]):
        said, found = (" x ".join(map(str, shape[1:])) for shape in (data.shape, source.shape))
        raise RecipeError(
            f"variant {variant.name!r} expects volumes of {said} voxels (data.shape), but those "
            f"of {data.where} have {found}\n    give such volumes, or set "
            f"data.shape=[{','.join(map(str, source.shape))}]"
        )
    try:
        chosen = selected(source, data.redshifts, data.targets, data.subvolume, data.multiple)
    except (LayoutError, DataError) as error:
        raise RecipeError(f"variant {variant.name!r}: {error}") from None
    for split in SPLITS:  # that of the test would be missed when all is trained
        try:
            samples_of_split(variant.recipe, chosen, split)
        except DataError as error:
            raise DataError(
                f"variant {variant.name!r}: {error}\n    a sweep trains, chooses rates on "
                "validation, and compares on test"
            ) from None


def shortened(recipe: Recipe, share: float) -> Recipe:
    """Shortens a training to a share of the epochs, and its schedule with it.

    So the rate has come down when it ends, as it will in the whole training. The test split is not
    looked at.
    """
    epochs = max(1, round(share * recipe.epochs))
    factor = epochs / recipe.epochs
    schedule = recipe.optimizer.schedule
    if schedule is None or isinstance(schedule, TargetSchedule):
        if share < 1 and schedule and "${training." not in str(schedule.arguments):
            raise RecipeError(
                f"optimizer.schedule.target {schedule.target}: its numbers are of whole trainings, "
                f"but rates are chosen in a share of {share:g} of the epochs\n    give them by "
                "${training.epochs} or ${training.steps}, or choose in whole ones: choose.epochs=1"
            )
        return recipe.model_copy(update={"epochs": epochs, "follow_test": False})
    values = schedule.model_dump()
    for key in ("epochs", "warmup"):
        if key in values:
            values[key] *= factor
    if "at" in values:
        steps = {epoch: round(epoch * factor) for epoch in values["at"]}
        if len({*steps.values()}) < len(steps) or any(e and not steps[e] for e in steps):
            raise RecipeError(
                f"optimizer.schedule.at: a share of {share:g} of {recipe.epochs} epochs, in which "
                f"rates are chosen, has no place for the steps at {', '.join(map(str, steps))}\n"
                "    choose in more epochs: choose.epochs"
            )
        values["at"] = {steps[epoch]: value for epoch, value in values["at"].items()}
    shorter = type(schedule).model_validate(values)
    optimizer = recipe.optimizer.model_copy(update={"schedule": shorter})
    return recipe.model_copy(
        update={"epochs": epochs, "optimizer": optimizer, "follow_test": False}
    )


def _variant(name: str, section: VariantSection, file: SweepFile, recipe: Recipe) -> SweepVariant:
    """Makes a variant, unless nothing could be chosen or compared by it."""
    if not (recipe.data.counts or recipe.data.fractions)[1]:
        raise RecipeError("rates are chosen on a validation split")
    if recipe.stop_at is not None:
        raise RecipeError(
            "stop_at would end its runs after different epochs, and a sweep compares runs of equal "
            "epochs: leave it out"
        )
    seeds = section.seeds or file.seeds
    rates = section.rates or file.rates
    if len({f"{rate:g}" for rate in rates}) < len(rates):
        words = ", ".join(map(str, rates))
        raise RecipeError(f"two of the rates {words} are the same to six digits")
    return SweepVariant(name, recipe, rates, seeds, file.choose.seeds or seeds[:1])


def _read_sweep_file(path: Path) -> SweepFile:
    values = load.read_yaml(path, "sweep")
    try:
        return SweepFile.model_validate(values)
    except ValidationError as error:
        raise RecipeError(load.explain_errors(error, values, str(path), {}, SweepFile)) from None
