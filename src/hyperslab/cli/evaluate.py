"""Runs `hyperslab evaluate`: measures a run's network on samples that it never saw."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hyperslab.checkpoint import find_checkpoint
from hyperslab.checkpoint.files import verify_checksums
from hyperslab.cli import options, rank
from hyperslab.errors import DataError
from hyperslab.recipe.load import recipe_for
from hyperslab.recipe.trust import RUN_RECIPE, trust_of
from hyperslab.util.atomic_files import check_links
from hyperslab.util.logs import show_logs

if TYPE_CHECKING:
    from rich.console import Console

    from hyperslab.train.evaluate import ClassEvaluation, Evaluation

OF_VOLUMES = {"averaged": "averaged", "recalibrated": "and recalibrated"}


def evaluate_command(
    context: typer.Context,
    run: options.RunArgument,
    overrides: options.OverridesArgument = None,
    ranks: options.RanksOption = None,
    checkpoint: options.CheckpointOption = "best",
    split: Annotated[
        Literal["test", "validation", "train", "all"], typer.Option(help="Split to measure.")
    ] = "test",
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Recalibrate the predictions of whole volumes by lines fitted to the validation "
            "split.",
        ),
    ] = False,
    surfaces: Annotated[
        bool,
        typer.Option(
            "--surfaces/--no-surfaces",
            help="Measure distances of surfaces [mm], if voxels have a size.",
        ),
    ] = True,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Tolerance of the surface Dice [mm].")
    ] = 2.0,
    window: options.WindowOption = None,
    overlap: options.OverlapOption = None,
    blend: options.BlendOption = None,
    trust: options.TrustOption = None,
) -> None:
    """Measure a trained network on the test split.

    Start ranks with --ranks, or run this command on every rank under torchrun or srun; any grid
    gives the same result. With --window, volumes are predicted in overlapping windows, as
    `hyperslab predict --window` does.
    """
    windows = options.windows_of_options(window, overlap, blend)
    rank.adopt_rank()
    trusted = trust_of(run / RUN_RECIPE, trust or ())
    with rank.telling_ranks():
        # Whole samples need no halos; windows of one sample are cut, as when they are predicted.
        axis = "depth" if windows else "data"
        recipe = recipe_for(run, overrides or [], ranks=ranks, axis=axis, trust=trusted)
        rank.check_ranks(recipe, ranks)
        if not rank.is_started():
            if not os.access(run, os.W_OK):  # now, and not when all is measured
                raise DataError(
                    f"{run} cannot be written, and its evaluation is written there\n    copy the "
                    "run into a folder of your own"
                )
            recipe.check_targets_exist("model", "data")
            path = find_checkpoint(run, checkpoint)
            verify_checksums(path)
            checkpoint = str(path)  # else what is said of damaged ones would be said again
            recipe.data.check_path()
            from hyperslab.train.samples import check_calibrated, check_data  # numpy

            if calibrate:
                check_calibrated(split)
            check_data(recipe, split, windows=windows)
    from rich.console import Console

    from hyperslab.train.evaluate import evaluate

    with rank.exit_when_stopped():
        if not rank.is_rank(recipe):
            check_links(run, "logs")
            rank.launch_again(context, recipe, run / "logs")
            return
        is_main = rank.become_rank()
        show_logs(is_main=is_main)
        result = rank.as_rank(evaluate)(
            run,
            checkpoint=checkpoint,
            split=split,
            overrides=overrides or [],
            calibrate=calibrate,
            surfaces=tolerance if surfaces else None,
            windows=windows,
            trust=trusted,
        )
        if is_main:
            show_evaluation(result, run, Console(soft_wrap=True, markup=False))


def show_evaluation(result: Evaluation | ClassEvaluation, run: Path, console: Console) -> None:
    """Print the errors of every parameter or class, the bad ones too."""
    from hyperslab.studies import table
    from hyperslab.train.evaluate import ClassEvaluation

    facts = result.facts
    console.print(
        f"{facts['samples']} samples of the {facts['split']} split, {facts['checkpoint']}, "
        f"{facts['seconds']:.1f} s",
        highlight=False,
    )
    if isinstance(result, ClassEvaluation):
        evaluation = {"confusion": result.confusion.tolist(), **facts}
        tables = [*table.class_tables(result.scores, evaluation)]
        words = "Dice of all voxels together, and the mean of the samples' own"
        if result.surfaces:
            words += "\ndistances: means over the samples that have the class in both masks"
    else:
        tables = [*table.number_tables(result.errors)]
        words = "ratio: MSE over that of predicting the training mean; 1 means nothing was learnt"
        if spread := facts.get("uncertainty"):
            tables.append(table.coverage_table(spread["parameters"], spread["joint"]))
            words += (
                f"\nintervals of {spread['volumes']} volumes, 95 %; residual²: squared errors over "
                "the predicted variance, 1 if calibrated; probability: that of such ranks if "
                "calibrated"
            )
        if averaged := [kind for kind in OF_VOLUMES if kind in facts]:
            of = [facts[kind]["parameters"] for kind in averaged]
            rows = [
                [name, *(table.number(one[name]["ratio"]) for one in of)] for name in result.errors
            ]
            head = ["ratio of volumes", *(OF_VOLUMES[kind] for kind in averaged)]
            tables.append(table.Table("", head, rows))
    console.print(*(one.for_terminal(padding=0, wrap_heads=True) for one in tables), sep="")
    console.print(
        f"{words}\nall numbers are in {run / 'evaluation'}; see them with: hyperslab report "
        f"{quote(str(run))}",
        highlight=False,
    )
