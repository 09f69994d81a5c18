"""Runs `hyperslab evaluate`: measures a run's network on samples that it never saw."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyperslab.cli.options import (
    BlendOption,
    CheckpointOption,
    OverlapOption,
    RanksOption,
    RunArgument,
    TrustOption,
    WindowOption,
    options_of_windows,
    windows_of_options,
)
from hyperslab.cli.rank import (
    adopt_rank,
    as_rank,
    become_rank,
    check_ranks,
    exit_when_stopped,
    is_rank,
    launch_command,
    telling_ranks,
)
from hyperslab.cli.terminal import log_to_stdout
from hyperslab.recipe.trust import RUN_RECIPE, Trust, trust_of
from hyperslab.train.evaluate import (
    ClassEvaluation,
    Evaluation,
    SurfacePolicy,
    evaluate,
    recipe_for,
)
from hyperslab.train.metrics import SURFACE_TOLERANCE
from hyperslab.train.sliding_windows import WindowPolicy
from hyperslab.util.atomic_files import check_links

COLUMNS = {
    "ratio": "ratio",
    "mse": "MSE",
    "mse_of_mean": "of mean",
    "mae": "MAE",
    "r2": "R²",
    "mae_physical": "MAE phys.",
    "relative_error": "relative",
}
OF_VOLUMES = {"averaged": "averaged", "recalibrated": "and recalibrated"}
OF_CLASSES = {
    "dice": "Dice",
    "dice_mean": "mean Dice",
    "iou": "IoU",
    "precision": "precision",
    "recall": "recall",
}

OF_SURFACES = {
    "hausdorff_95_mm": "Hausdorff 95 % [mm]",
    "average_surface_distance_mm": "average [mm]",
}
OF_PRESENCE = {
    "samples_both": "samples",
    "samples_missed": "missed",
    "samples_invented": "invented",
}


def evaluate_command(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value; grid.depth=2 is a grid of its own.")
    ] = None,
    ranks: RanksOption = None,
    checkpoint: CheckpointOption = "best",
    split: Annotated[str, typer.Option(help="test, validation, train or all.")] = "test",
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Recalibrate predictions for whole volumes by lines fitted to the validation "
            "split.",
        ),
    ] = False,
    surfaces: Annotated[
        bool,
        typer.Option(
            "--surfaces/--no-surfaces",
            help="Of classes: measure how far apart surfaces are [mm], where voxels have a size.",
        ),
    ] = True,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Of the surface Dice [mm].")
    ] = SURFACE_TOLERANCE,
    window: WindowOption = None,
    overlap: OverlapOption = None,
    blend: BlendOption = None,
    trust: TrustOption = None,
) -> None:
    """Measure a network on the test split; also under torchrun and srun, on any grid.

    With --window volumes are predicted in windows that overlap, each cut over all ranks, as
    `hyperslab predict --window` does.
    """
    windows = windows_of_options(window, overlap, blend)
    adopt_rank()
    overrides = overrides or []
    trusted = trust_of(run / RUN_RECIPE, trust or ())
    with telling_ranks():
        axis = "depth" if windows else "data"
        recipe = recipe_for(run, overrides, ranks=ranks, axis=axis, trust=trusted)
        check_ranks(recipe, ranks)
    with exit_when_stopped():
        if is_rank(recipe):
            evaluate_as_rank(
                run,
                overrides,
                checkpoint=checkpoint,
                split=split,
                calibrate=calibrate,
                surfaces=SurfacePolicy(surfaces, tolerance),
                windows=windows,
                trust=trusted,
            )
            return
        options = ["--checkpoint", checkpoint, "--split", split]
        options += ["--calibrate"] if calibrate else []
        options += ["--tolerance", str(tolerance)] if surfaces else ["--no-surfaces"]
        options += [*options_of_windows(windows), *trusted.options]
        check_links(run, "logs")
        launch_command(recipe, ["evaluate", str(run), *overrides, *options], run / "logs")


@as_rank
def evaluate_as_rank(
    run: Path,
    overrides: Sequence[str],
    *,
    checkpoint: str,
    split: str,
    calibrate: bool,
    surfaces: SurfacePolicy,
    windows: WindowPolicy | None,
    trust: Trust,
) -> None:
    """Evaluate as one rank; the main one prints."""
    is_main = become_rank()
    log_to_stdout(logging.WARNING)
    result = evaluate(
        run,
        checkpoint=checkpoint,
        split=split,
        overrides=overrides,
        calibrate=calibrate,
        surfaces=surfaces,
        windows=windows,
        trust=trust,
    )
    if is_main:
        show_evaluation(result, run, Console(soft_wrap=True))


def show_evaluation(result: Evaluation | ClassEvaluation, run: Path, console: Console) -> None:
    """Print the errors of every parameter or class, the bad ones too."""
    facts = result.facts
    console.print(
        f"{facts['samples']} samples of the {facts['split']} split, {facts['checkpoint']}, "
        f"{facts['seconds']:.1f} s",
        highlight=False,
    )
    if isinstance(result, ClassEvaluation):
        console.print(table_of_classes(result), table_of_confusion(result), sep="")
        if result.surfaces:
            console.print(table_of_surfaces(result))
        words = "Dice of all voxels together, and the mean of the samples' own"
        if result.surfaces:
            words += "\ndistances: means over the samples that have the class in both masks"
    else:
        console.print(table_of(result.errors))
        if any(kind in result.facts for kind in OF_VOLUMES):
            console.print(table_of_volumes(result))
        words = "ratio: MSE over that of predicting the training mean; 1 means nothing was learnt"
        words += f"\n{relative_errors(result.errors)}"
    console.print(
        f"{words}\nall numbers are in {run / 'evaluation'}; see them with: hyperslab report {run}",
        highlight=False,
    )


def table_of(errors: dict[str, dict[str, float]]) -> Table:
    """Return one row a parameter: its errors."""
    table = _empty_table("parameter", COLUMNS.values())
    for name, row in errors.items():
        cells = [f"{row[key]:.3g}" for key in COLUMNS if key != "relative_error"]
        table.add_row(name, *cells, f"{row['relative_error']:.2%}")
    return table


def table_of_volumes(result: Evaluation) -> Table:
    """Return one row a parameter: the ratios of predictions for whole volumes."""
    found = {kind: head for kind, head in OF_VOLUMES.items() if kind in result.facts}
    table = _empty_table("ratio of volumes", found.values())
    for name in result.errors:
        rows = [result.facts[kind]["parameters"][name] for kind in found]
        table.add_row(name, *(f"{row['ratio']:.3g}" for row in rows))
    return table


def relative_errors(errors: dict[str, dict[str, float]]) -> str:
    """Print the relative errors of Mathuriya et al. 2018, section VII-A, and those of the mean."""
    found = [
        f"{name} {row['relative_error_sc18']:.4f} ({row['relative_error_sc18_of_mean']:.4f})"
        for name, row in errors.items()
    ]
    return f"relative errors by SC18's formula (of the mean): {', '.join(found)}"


def table_of_classes(result: ClassEvaluation) -> Table:
    """Return one row a class: its scores."""
    table = _empty_table("class", OF_CLASSES.values())
    for name, row in result.scores.items():
        table.add_row(name, *(f"{row[key]:.3g}" for key in OF_CLASSES))
    return table


def table_of_surfaces(result: ClassEvaluation) -> Table:
    """Return one row a class but the background: distances, and where there are none."""
    tolerance = result.facts["surfaces"]["tolerance_mm"]
    head = {**OF_SURFACES, "surface_dice": f"surface Dice at {tolerance:g} mm"}
    table = _empty_table("surfaces", [*head.values(), *OF_PRESENCE.values()])
    for name in result.classes[1:]:
        row = result.scores[name]
        cells = [f"{row[key]:.3g}" for key in head]
        table.add_row(name, *cells, *(f"{row[key]:.0f}" for key in OF_PRESENCE))
    return table


def table_of_confusion(result: ClassEvaluation) -> Table:
    """Return one row a true class: which share of its voxels was given to each class [%]."""
    table = _empty_table("true voxels as", result.classes)
    for name, counts in zip(result.classes, result.confusion, strict=True):
        table.add_row(name, *(f"{100 * n / max(counts.sum(), 1):.3g} %" for n in counts))
    return table


def _empty_table(first: str, others: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for head in others:
        table.add_column(Text(head), justify="right", min_width=_longest_word(head))
    return table


def _longest_word(head: str) -> int:
    """Return the longest word: a narrow terminal breaks heads between words, and shortens none."""
    return max(map(len, head.split()), default=0)
