"""Evaluates a run: predicts a split that the network never saw, and measures the errors.

In reading order: distances of surfaces in the samples of an evaluation; networks that give every
voxel its class; networks that predict numbers; targets of other files, scaled by the ranges of
the training; and `evaluate`, which opens a run's checkpoint and writes ``RUN/evaluation``.

Legend: N samples, C classes, P parameters.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hyperslab import checkpoint as checkpoints
from hyperslab.checkpoint.run_state import DataCard
from hyperslab.checkpoint.save_load import load, on_main
from hyperslab.comm import Grid, agreement
from hyperslab.data import Dataset
from hyperslab.errors import DataError, HyperslabError
from hyperslab.formats.source import Source
from hyperslab.formats.targets import Parameters
from hyperslab.recipe.compare import launch_facts
from hyperslab.recipe.load import recipe_for
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.trust import Trust
from hyperslab.tensor import Sharded
from hyperslab.tensor.root_rank import gather_to_main
from hyperslab.train import builders, metrics
from hyperslab.train.moving_average import use_averages
from hyperslab.train.network import NO_USER_OBJECTS, UserObjects
from hyperslab.train.objective import MeansOfMetrics, build_metrics
from hyperslab.train.samples import (
    WindowPolicy,
    check_calibrated,
    check_windows,
    samples_of_split,
    training_digest,
)
from hyperslab.train.sliding_windows import WindowedModel
from hyperslab.train.step import autocast
from hyperslab.train.uncertainty import moments_of, spread_columns, uncertainty_of
from hyperslab.util import atomic_files
from hyperslab.util.free_memory import free_memory
from hyperslab.util.optional_libraries import current_versions

log = logging.getLogger("hyperslab")

# By sample and class, not the background.
SampleSurfaces = dict[str, dict[str, metrics.SurfaceScores]]


@dataclass
class Surfaces:
    """Measures surfaces sample by sample on the main rank, which then holds both masks of one.

    ``tolerance`` [mm]: of the surface Dice, None to measure nothing. ``left_out``: why some or all
    were not measured.
    """

    data: Dataset
    tolerance: float | None
    found: SampleSurfaces = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.tolerance is not None and not self.tolerance >= 0:
            raise DataError(f"tolerance {self.tolerance:g} mm: needs to be >= 0")
        self.wanted = self.tolerance is not None
        if self.wanted and (why := agreement.broadcast_from_main(self._why_not)):
            self.left_out.append(why)
            self.wanted = False

    def _why_not(self) -> str:
        """Return why none can be measured; nothing where some can."""
        if self.data.source.voxel_size(self.data.schedule.samples[0]) is None:
            return "the files do not say how large a voxel is"
        try:
            metrics.monai_metrics()
        except HyperslabError as error:
            return str(error)
        return ""

    def add(self, predicted: Sharded, true: Sharded) -> None:
        """Add the samples of the mini-batch last shown, (B, D, H, W) both; every rank calls it.

        Distribution scheme: 1. both masks are collected on the main rank, as bytes, 2. which
        measures them while the others go on to the next sample.
        """
        if not self.wanted:
            return
        masks = gather_to_main(predicted)
        truth = gather_to_main(true.like(true.local.to(torch.uint8), true.partition))
        if masks is None or truth is None:
            return
        for sample, mask, real in zip(self.data.shown, masks, truth, strict=True):
            self._measure(sample, mask, real)

    def _measure(self, sample: int, predicted: NDArray[Any], true: NDArray[Any]) -> None:
        name = self.data.source.names[sample]
        voxel = self.data.source.voxel_size(sample)
        if voxel is None:
            self.left_out.append(f"{name}: its file does not say how large a voxel is")
            return
        needed = metrics.bytes_to_measure(true, predicted)
        if needed > (free := free_memory()):
            gib = 1 << 30
            self.left_out.append(
                f"{name}: measuring it takes {needed / gib:.1f} GiB, and {free / gib:.1f} are free"
            )
            return
        assert self.tolerance is not None
        self.found[name] = {
            of: metrics.surface_scores(true, predicted, label, voxel, self.tolerance)
            for label, of in enumerate(self.data.classes)
            if label
        }

    def result(self) -> tuple[SampleSurfaces, list[str]]:
        """Return the scores and why some are missing; all ranks call it and get the same."""
        found, left_out = agreement.broadcast_from_main(lambda: (self.found, self.left_out))
        if self.data.grid.is_main and self.tolerance is not None:
            for words in left_out:
                log.warning("surface distances are left out: %s", words)
        return found, left_out


Masks = dict[str, NDArray[np.uint8]]

FACTS_FILE = "metrics.json"  # in an evaluation's folder: without it there is no evaluation
MASKS_SHOWN = 3  # samples whose masks are kept for the report


@dataclass(frozen=True, slots=True)
class ClassEvaluation:
    """Holds the scores of one checkpoint on one split.

    ``confusions`` (N, C, C) are those of ``samples``. ``masks`` (D, H, W) of some of them are on
    the main rank only. ``facts`` say how it all came about.
    """

    classes: tuple[str, ...]
    samples: tuple[str, ...]
    confusions: metrics.Counts
    masks: Masks
    facts: dict[str, Any] = field(default_factory=dict)
    surfaces: SampleSurfaces = field(default_factory=dict)

    @property
    def confusion(self) -> metrics.Counts:
        """Add up the confusion matrices of all samples (C, C); the row is the true class."""
        total: metrics.Counts = self.confusions.sum(0)
        return total

    @property
    def scores(self) -> dict[str, metrics.Scores]:
        """Return each class's scores over all voxels together, with ``dice_mean`` of `mean_dice`.

        Where surfaces were measured, every class but the background has `surface_summary` too.
        """
        means = mean_dice(self.confusions, self.classes)
        found: dict[str, metrics.Scores] = {}
        for name, scores in metrics.scores_of(self.confusion, self.classes).items():
            found[name] = {"dice_mean": means[name], **scores}
            if self.surfaces and name != self.classes[0]:
                found[name] |= metrics.surface_summary([by[name] for by in self.surfaces.values()])
        return found

    def write(self, folder: Path) -> None:
        """Write ``metrics`` (.json, .csv), ``confusion.csv``, ``samples.csv``, ``masks.npz``."""
        scores = self.scores
        classes = self.classes
        keys = list(dict.fromkeys(key for row in scores.values() for key in row))
        rows = (
            [name, *(row.get(key, float("nan")) for key in keys)] for name, row in scores.items()
        )
        atomic_files.write_csv(folder / "metrics.csv", ["class", *keys], rows)
        rows = ([n, *row] for n, row in zip(classes, self.confusion.tolist(), strict=True))
        atomic_files.write_csv(folder / "confusion.csv", ["true \\ predicted", *classes], rows)
        atomic_files.write_csv(folder / "samples.csv", *self._by_sample())
        arrays: dict[str, Any] = {f"mask_{i}": mask for i, mask in enumerate(self.masks.values())}
        if len({mask.shape for mask in self.masks.values()}) == 1:
            arrays = {"masks": np.stack(list(self.masks.values()))}
        with atomic_files.created_aside(folder / "masks.npz") as file:
            np.savez_compressed(file, samples=np.array(list(self.masks)), **arrays)
        content = {"classes": scores, "confusion": self.confusion.tolist(), **self.facts}
        atomic_files.write_json(folder / FACTS_FILE, content)

    def _by_sample(self) -> tuple[list[str], list[list[object]]]:
        """Return the table of samples; cells are empty where no surface was measured."""
        kinds = ("dice", "iou", "precision", "recall")
        head = ["sample", *(f"{kind}_{name}" for name in self.classes for kind in kinds)]
        if self.surfaces:
            of = ("presence", "hausdorff_95_mm", "average_surface_distance_mm", "surface_dice")
            head += [f"{kind}_{name}" for name in self.classes[1:] for kind in of]
        rows: list[list[object]] = []
        for sample, confusion in zip(self.samples, self.confusions, strict=True):
            scores = metrics.scores_of(confusion, self.classes).values()
            rows.append([sample, *(score[kind] for score in scores for kind in kinds)])
            for name in self.classes[1:] if self.surfaces else ():
                one = self.surfaces.get(sample, {}).get(name)
                rows[-1] += [None] * 4 if one is None else astuple(one)
        return head, rows


def mean_dice(confusions: metrics.Counts, classes: Sequence[str]) -> dict[str, float]:
    """Average the samples' own Dice by class, over the samples that have such voxels.

    NaN where none has. Every sample counts alike here, a large organ no more than a small one.
    """
    of_samples = [metrics.scores_of(confusion, classes) for confusion in confusions]
    there = confusions.sum(2) > 0
    return {
        name: float(np.mean(values)) if values else float("nan")
        for i, name in enumerate(classes)
        for values in [[s[name]["dice"] for s, t in zip(of_samples, there[:, i], strict=True) if t]]
    }


@torch.no_grad()
def evaluate_segmentation(
    model: torch.nn.Module,
    data: Dataset,
    recipe: Recipe,
    tolerance: float | None = None,
    further: MeansOfMetrics | None = None,
    windows: WindowPolicy | None = None,
) -> ClassEvaluation:
    """Predict every sample once; the counts are the same on every rank.

    With ``windows`` in windows that overlap; with a ``tolerance`` `Surfaces` are measured.
    ``further`` metrics see all, too.

    Distribution scheme: 1. each rank counts its boxes of every sample, 2. one sum over all ranks
    in the end; 3. the masks to be shown are collected on the main rank, as bytes, and where
    surfaces are to be measured all of them, one after the other.
    """
    model.eval()
    predicting = model if windows is None else WindowedModel(model, windows, len(data.classes))
    surfaces = Surfaces(data, tolerance)
    grid = data.grid
    size = len(data.classes)
    names: list[str] = []
    counts: list[torch.Tensor] = []
    masks: list[NDArray[np.uint8]] = []
    for x, y in data.epoch(0):
        stored = data.source.unpadded(data.shown[0])
        added = stored != tuple(x.shape[2:])  # what was added counts for nothing
        inside = (slice(None), *(slice(extent) for extent in stored))
        if added and windows is not None:
            x = cast(Sharded, x[slice(None), *inside])
        with autocast(grid.device, recipe.precision):
            prediction = predicting(x)
        if added:
            prediction = cast(Sharded, prediction[slice(None), *inside])
            y = cast(Sharded, y[inside])
        if further is not None:
            further.add(prediction, y)
        predicted = metrics.predicted_classes(prediction)
        counts.append(metrics.count_confusion(predicted, y, size))
        surfaces.add(predicted, y)
        if len(names) < MASKS_SHOWN:
            whole = gather_to_main(predicted)
            masks += [] if whole is None else list(whole)
        names += data.shown_names
    confusions = metrics.sum_over_ranks(torch.cat(counts), grid).cpu().numpy()
    shown = dict(zip(names, masks[:MASKS_SHOWN], strict=False))
    found, left_out = surfaces.result()
    facts: dict[str, Any] = {}
    if tolerance is not None:
        facts["surfaces"] = {
            "tolerance_mm": tolerance,
            "samples": len(found),
            "left_out": left_out,
        }
    if windows is not None:
        facts["windows"] = windows.facts
    if data.source.channel_names:
        facts["channels"] = list(data.source.channel_names)
    return ClassEvaluation(data.classes, tuple(names), confusions, shown, facts, found)


VALIDATION_FILE = "validation.csv"  # in an evaluation's folder: predictions of the validation split


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Holds the errors of one checkpoint on one split; ``facts`` say how they came about.

    ``validation`` are the predictions of the validation split, where lines were fitted to them.
    """

    predictions: metrics.Predictions
    errors: dict[str, dict[str, float]]
    facts: dict[str, Any]
    validation: metrics.Predictions | None = None

    def write(self, folder: Path) -> None:
        """Write ``predictions.csv``, ``metrics.csv``, ``metrics.json``, each whole or not.

        And ``validation.csv``, if there is something to write.
        """
        write_predictions(folder / "predictions.csv", self.predictions)
        if self.validation is not None:
            write_predictions(folder / VALIDATION_FILE, self.validation)
        keys = list(self.errors[self.predictions.names[0]])
        errors = ([name, *row.values()] for name, row in self.errors.items())
        atomic_files.write_csv(folder / "metrics.csv", ["parameter", *keys], errors)
        atomic_files.write_json(folder / FACTS_FILE, {"parameters": self.errors, **self.facts})


def write_predictions(path: Path, p: metrics.Predictions) -> None:
    """Write one row a sample, with the volume that it is a part of.

    Last come `spread_columns`, where the predictions have a covariance.
    """
    columns = [p.true, p.predicted, p.true_physical, p.predicted_physical]
    values = np.stack(columns, axis=-1).reshape(len(p.samples), -1)
    kinds = ("true", "predicted", "true_phys", "predicted_phys")
    head = ["sample", "volume", *(f"{kind}_{name}" for name in p.names for kind in kinds)]
    spread = spread_columns(p.parameters, p.covariance)
    head += spread
    values = np.column_stack([values, *spread.values()])
    rows = zip(p.samples, p.volumes, values.tolist(), strict=True)
    atomic_files.write_csv(path, head, ([sample, volume, *row] for sample, volume, row in rows))


def evaluate_regression(
    model: torch.nn.Module,
    data: Dataset,
    recipe: Recipe,
    validation: Dataset | None = None,
    further: MeansOfMetrics | None = None,
) -> Evaluation:
    """Predict every sample once; every rank gets the same.

    With ``validation``, the validation split, a line for each parameter is fitted to its volumes
    and recalibrates the predictions for the volumes of ``data``. ``further`` see all of it.
    """
    mean = training_mean(data, recipe)
    predictions = _predictions_of_split(model, data, recipe, mean, further)
    errors = metrics.errors_per_parameter(predictions)
    facts: dict[str, Any] = {
        "mean": metrics.means_over_parameters(errors),
        "training_mean": dict(zip(data.targets, mean.tolist(), strict=True)),
    }
    if uncertainty := uncertainty_of(predictions):
        facts["uncertainty"] = uncertainty
    whole = metrics.averaged_over_volumes(predictions)
    if len(whole.samples) < len(predictions.samples):
        facts["averaged"] = {"volumes": len(whole.samples), **_errors_and_means(whole)}
    if validation is None:
        return Evaluation(predictions, errors, facts)
    seen = _predictions_of_split(model, validation, recipe, mean)
    lines = metrics.calibration_of(seen)
    better = metrics.recalibrated(whole, lines)
    facts["recalibrated"] = {
        "volumes": len(whole.samples),
        **_errors_and_means(better),
        "slope": dict(zip(data.targets, lines.slope.tolist(), strict=True)),
        "intercept": dict(zip(data.targets, lines.intercept.tolist(), strict=True)),
    }
    return Evaluation(predictions, errors, facts, seen)


@torch.no_grad()
def _predictions_of_split(
    model: torch.nn.Module,
    data: Dataset,
    recipe: Recipe,
    mean: metrics.FloatArray,
    further: MeansOfMetrics | None = None,
) -> metrics.Predictions:
    """Return what is predicted for all samples, as in epoch 0; every rank gets the same."""
    model.eval()
    names: list[str] = []
    targets: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for x, y in data.epoch(0):
        with autocast(data.grid.device, recipe.precision):
            prediction = model(x)
            if further is not None:
                further.add(prediction, y)
        targets.append(y.full().double().cpu())
        outputs.append(prediction.full().double().cpu())
        names += data.shown_names
    predicted, covariance = moments_of(torch.cat(outputs).numpy(), len(data.targets))
    source = data.source
    volumes = {name: source.volume(sample) for sample, name in enumerate(source.names)}
    return metrics.Predictions(
        parameters=data.parameters,
        samples=tuple(names),
        true=torch.cat(targets).numpy(),
        predicted=predicted,
        training_mean=mean,
        volumes=tuple(volumes[name] for name in names),
        covariance=covariance,
    )


def _errors_and_means(p: metrics.Predictions) -> dict[str, Any]:
    errors = metrics.errors_per_parameter(p)
    return {"parameters": errors, "mean": metrics.means_over_parameters(errors)}


def training_mean(data: Dataset, recipe: Recipe) -> metrics.FloatArray:
    """Return the mean of the normalised targets (P,) over the training split.

    Of all samples, where all are measured and they have no such split: a folder of a few others.
    """
    source = data.source
    try:
        chosen = samples_of_split(recipe, source, "train")
    except DataError as error:
        chosen = [*data.schedule.samples]
        if len(chosen) < len(source.names):
            raise
        if data.grid.is_main:
            log.warning(
                "%s has no training split: errors are compared with those of predicting the mean "
                "of all samples\n    (%s)",
                recipe.data.where,
                str(error).splitlines()[0],
            )
    return np.mean([source.target(sample) for sample in chosen], axis=0, dtype=np.float64)


def _are_others(trained: object, recipe: Recipe, source: Source) -> bool:
    """Say whether a network was trained on another split or other files, if that is known."""
    try:
        return trained is not None and trained != training_digest(recipe, source)
    except DataError:  # these have no training split
        return True


def with_trained_ranges(recipe: Recipe, data: Dataset, about: DataCard | None) -> Recipe:
    """Return the recipe with the ranges of the training, where the data have others; else itself.

    Targets of tables and keys are scaled by the least and the greatest of all samples, unless a
    recipe says otherwise: of other samples these are other numbers. Those in the volumes' files are
    scaled already.

    Raises:
        DataError: the targets are not those of the training, or scaled otherwise.
    """
    if about is None:
        return recipe
    if not data.source.targets_apart:
        check_scales(recipe, data.source, data.schedule.samples, about.parameters)
        return recipe
    trained, found = about.parameters, data.parameters
    if trained.names != found.names:
        raise DataError(
            f"{recipe.data.where} has the targets {', '.join(found.names)} but the network was "
            f"trained on {', '.join(trained.names)}\n    data.columns names the columns of a "
            "table, data.targets chooses some of them"
        )
    alike = np.allclose(trained.centre, found.centre, rtol=1e-12, atol=0)
    if alike and np.allclose(trained.scale, found.scale, rtol=1e-12, atol=0):
        return recipe
    ranges = {**(recipe.data.ranges or {}), **trained.ranges}
    section = recipe.data.model_copy(update={"ranges": ranges})
    return recipe.model_copy(update={"data": section})


NEAR_SCALE = 1e-3  # of a parameter's range: lines are fitted to the files' numbers


def check_scales(
    recipe: Recipe, source: Source, samples: Sequence[int], trained: Parameters
) -> None:
    """Refuse targets that stand for other physical values than those of the training did.

    Lines may differ where no sample is. Parameters whose physical values are the normalised ones
    say nothing, nor do those that did not vary in the training.

    Raises:
        DataError: names the parameter and its ranges.
    """
    found = source.parameters
    unknown = Parameters.normalised(trained.names)
    if trained.names != found.names or not trained.names or unknown in (trained, found):
        return
    unit = np.array([source.target(sample) for sample in samples])
    physical = found.physical(unit)
    off = np.abs(physical - trained.physical(unit)).max(0)
    near = NEAR_SCALE + 2 * max(trained.misfit, found.misfit)
    said = np.abs(physical - unit).max(0) > near  # else they are normalised, too
    wrong = [
        i
        for i, scale in enumerate(trained.scale)
        if scale and said[i] and off[i] > near * abs(scale)
    ]
    if wrong:
        name = trained.names[wrong[0]]
        here, there = (" to ".join(f"{v:.4g}" for v in of.ranges[name]) for of in (found, trained))
        raise DataError(
            f"{recipe.data.where} gives {name} as -1 to 1 for {here}, and the network was trained "
            f"on -1 to 1 for {there}\n    `hyperslab predict` gives physical values of such files; "
            "or bring them to the same ranges (hyperslab simulate --ranges)"
        )


def evaluate(
    run: str | Path,
    *,
    checkpoint: str = "best",
    split: str = "test",
    overrides: Sequence[str] = (),
    calibrate: bool = False,
    surfaces: float | None = metrics.SURFACE_TOLERANCE,
    windows: WindowPolicy | None = None,
    given: UserObjects = NO_USER_OBJECTS,
    trust: Trust | None = None,
) -> Evaluation | ClassEvaluation:
    """Predict every sample of a split once and write what comes of it to ``run/evaluation``.

    Every rank calls it alike and gets the same numbers, which do not depend on the grid. The
    network predicts without dropout and augmentation, in the recipe's precision.

    Args:
        run: the folder of a training run.
        checkpoint: "best" (of the lowest validation loss), "latest", the name of one of the
            run's checkpoints, or a path.
        split: "test", "validation", "train" or "all".
        overrides: see `recipe_for`.
        calibrate: predict the validation split, too, and recalibrate the predictions for whole
            volumes by lines that are fitted to it; see `evaluate_regression`.
        surfaces: of classes, the tolerance [mm] with which their distances are measured where the
            files say how large a voxel is, on one rank that then holds the masks of a sample; None:
            they are not.
        windows: of classes, predict volumes in windows that overlap, each cut over all ranks.
        given: the network and the source of a run that a program has trained.
        trust: see `load_recipe`.

    Raises:
        DataError: not a run's folder, no such checkpoint, nothing to calibrate or no other split
            to do so, or the results cannot be written.
        CheckpointError: the checkpoint is corrupt or of another network.
        RecipeError: an override is bad.
        LayoutError: the grid does not match the ranks.
    """
    if calibrate:
        check_calibrated(split)
    run = Path(run)
    recipe = recipe_for(run, overrides, axis="data" if windows is None else "depth", trust=trust)
    options = {"checkpoint": checkpoint, "split": split, "calibrate": calibrate}
    with started_ranks(recipe, "evaluate", run, windows, **options) as grid, ExitStack() as stack:
        path = find_checkpoint(run, checkpoint)

        def opened(recipe: Recipe, split: str) -> Dataset:
            found = builders.open_data(recipe, grid, split=split, shuffle=False, given=given)
            return stack.enter_context(found)

        data = opened(recipe, split)
        trained_on = on_main(partial(DataCard.of_checkpoint, path), f"cannot read {path}")
        ranged = with_trained_ranges(recipe, data, trained_on)
        if ranged is not recipe:
            recipe, data = ranged, opened(ranged, split)
        if calibrate and data.classes:
            raise DataError(f"{recipe.data.where} has classes: calibration is for parameters")
        check_windows(windows, data.classes)
        about = builders.data_card(data.source)
        model = builders.build_model(recipe, about, grid, given)
        state = load(path, model)
        use_averages(model, state.get("ema"), path)
        if grid.is_main and _are_others(state.get("samples"), recipe, data.source):
            log.warning(
                "%s was trained on another split or other files: the %s split of %s may hold "
                "samples that it has seen",
                path,
                split,
                recipe.data.where,
            )
        begin = time.perf_counter()
        cuda = grid.device.type == "cuda"
        further = MeansOfMetrics(grid, build_metrics(recipe, about, given))
        result: Evaluation | ClassEvaluation
        if data.classes:
            result = evaluate_segmentation(model, data, recipe, surfaces, further, windows)
        else:
            seen = opened(recipe, "validation") if calibrate else None
            result = evaluate_regression(model, data, recipe, seen, further)
        result.facts.update(
            samples=len(data),
            split=split,
            checkpoint=path.name,
            epochs=state.get("position", {}).get("epoch"),
            weights=sum(p.numel() for p in model.parameters()),
            grid=grid.extents,
            precision=recipe.precision,
            **({"metrics": further.result()} if further.metrics else {}),
            seconds=time.perf_counter() - begin,
            device=torch.cuda.get_device_name(grid.device) if cuda else "CPU",
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=current_versions(),
        )
        folder = run / "evaluation"

        def write() -> None:
            atomic_files.check_links(run, folder.name)
            write_evaluation(result, folder)

        agreement.broadcast_from_main(write, failing=f"cannot write into {folder}")
    return result


def write_evaluation(result: Evaluation | ClassEvaluation, folder: Path) -> None:
    """Write all files beside the folder, then move them there: an older evaluation is not mixed in.

    Without its facts, ``metrics.json``, a folder holds none, as one that a kill leaves half moved.

    Raises:
        OSError: they cannot be written; what was there stays.
    """
    aside = atomic_files.partial_path(folder)
    atomic_files.make_scratch(aside)
    try:
        result.write(aside)
        folder.mkdir(exist_ok=True)
        (folder / FACTS_FILE).unlink(missing_ok=True)
        if not (isinstance(result, Evaluation) and result.validation is not None):
            (folder / VALIDATION_FILE).unlink(missing_ok=True)  # of another checkpoint
        for path in sorted(aside.iterdir(), key=lambda path: path.name == FACTS_FILE):
            path.replace(folder / path.name)
    finally:
        atomic_files.remove_scratch(aside)


@contextmanager
def started_ranks(
    recipe: Recipe, command: str, run: Path, windows: WindowPolicy | None = None, **options: object
) -> Iterator[Grid]:
    """Give the grid of the ranks of a command on a run, which all have the same ``options``."""
    options |= {"run": str(run.absolute()), **({} if windows is None else windows.facts)}
    facts = launch_facts(recipe, command=command, **options)
    numbering = builders.numbering_of(recipe)
    started = agreement.start_alike(recipe.device, recipe.timeout, facts, numbering)
    what = f"{command} with timeout={recipe.timeout:g} s"
    lost = agreement.naming_lost_ranks(what, "run the same command again")
    try:
        with agreement.failure_broadcast(), lost:
            yield Grid(**recipe.grid.model_dump())
    finally:
        if started:
            dist.destroy_process_group()


def find_checkpoint(run: Path, which: str) -> Path:
    """Find the folder of "best", "latest", a name or a path; every rank calls it.

    Raises:
        DataError, CheckpointError: as `hyperslab.checkpoint.find_checkpoint`.
    """
    failing = f"cannot read {checkpoints.folder_of(run)}"
    return on_main(partial(checkpoints.find_checkpoint, run, which), failing)
