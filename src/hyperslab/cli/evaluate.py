"""Runs `hyperslab evaluate`: measures a run's network on samples that it never saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hyperslab.checkpoint import find_checkpoint
from hyperslab.checkpoint.files import verify_checksums
from hyperslab.cli import options, rank
from hyperslab.recipe.load import recipe_for
from hyperslab.recipe.trust import RUN_RECIPE, trust_of
from hyperslab.util.atomic_files import check_links
from hyperslab.util.logs import show_logs

if TYPE_CHECKING:
    from rich.console import Console

    from hyperslab.studies.table import Table
    from hyperslab.train.evaluate import ClassEvaluation, Evaluation

RELATIVE = "relative_error"
COLUMNS = {
    "ratio": "ratio",
    "mse": "MSE",
    "mse_of_mean": "of mean",
    "mae": "MAE",
    "r2": "R²",
    "mae_physical": "MAE phys.",
    RELATIVE: "relative",
}
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
            show_evaluation(result, run, Console(soft_wrap=True))


def show_evaluation(result: Evaluation | ClassEvaluation, run: Path, console: Console) -> None:
    """Print the errors of every parameter or class, the bad ones too."""
    from hyperslab.studies.class_tables import class_tables
    from hyperslab.train.evaluate import ClassEvaluation

    facts = result.facts
    console.print(
        f"{facts['samples']} samples of the {facts['split']} split, {facts['checkpoint']}, "
        f"{facts['seconds']:.1f} s",
        highlight=False,
    )
    if isinstance(result, ClassEvaluation):
        evaluation = {"confusion": result.confusion.tolist(), **facts}
        tables = list(class_tables(result.scores, evaluation))
        words = "Dice of all voxels together, and the mean of the samples' own"
        if result.surfaces:
            words += "\ndistances: means over the samples that have the class in both masks"
    else:
        tables = list(_tables_of_parameters(result))
        words = "ratio: MSE over that of predicting the training mean; 1 means nothing was learnt"
        # Of Mathuriya et al. 2018, section VII-A, and those of predicting the mean.
        found = [
            f"{name} {row['relative_error_sc18']:.4f} ({row['relative_error_sc18_of_mean']:.4f})"
            for name, row in result.errors.items()
        ]
        if spread := facts.get("uncertainty"):
            words += (
                f"\nintervals of {spread['volumes']} volumes, 95 %; residual²: mean of (true - "
                "predicted)² over the predicted variance, 1 if calibrated; KS p: probability of "
                "such ranks if calibrated"
            )
        words += f"\nrelative errors by SC18's formula (of the mean): {', '.join(found)}"
    console.print(*(table.for_terminal(wrap_heads=True) for table in tables), sep="")
    console.print(
        f"{words}\nall numbers are in {run / 'evaluation'}; see them with: hyperslab report {run}",
        highlight=False,
    )


def _tables_of_parameters(result: Evaluation) -> Iterator[Table]:
    """Make a row of each parameter: its errors, and the ratios of whole volumes."""
    from hyperslab.studies.table import Table

    rows = [
        [name, *(f"{row[key]:.2%}" if key == RELATIVE else f"{row[key]:.3g}" for key in COLUMNS)]
        for name, row in result.errors.items()
    ]
    yield Table("", ["parameter", *COLUMNS.values()], rows)
    if spread := result.facts.get("uncertainty"):
        rows = [
            [
                name,
                *(_covered(row, level) for level in (68, 95)),
                f"{row['mean_squared_residual']:.3g}",
                f"{row['ks_probability']:.2g}",
            ]
            for name, row in (*spread["parameters"].items(), ("together", spread["joint"]))
        ]
        head = ["true values inside", "68 % interval", "95 % interval", "residual²", "KS p"]
        yield Table("", head, rows)
    found = {kind: head for kind, head in OF_VOLUMES.items() if kind in result.facts}
    if found:
        of = [result.facts[kind]["parameters"] for kind in found]
        rows = [[name, *(f"{one[name]['ratio']:.3g}" for one in of)] for name in result.errors]
        yield Table("", ["ratio of volumes", *found.values()], rows)


def _covered(row: Mapping[str, Any], level: int) -> str:
    """Write the share of true values in intervals of a level [%], and its own interval."""
    lower, upper = (100 * end for end in row[f"coverage_{level}_interval"])
    return f"{100 * row[f'coverage_{level}']:.0f} % ({lower:.0f} to {upper:.0f})"
