"""Runs `hyperslab predict`: writes masks or parameters of volumes, with a run's network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hyperslab.checkpoint import find_checkpoint
from hyperslab.checkpoint.files import verify_checksums
from hyperslab.cli import options, rank
from hyperslab.cli.terminal import progress
from hyperslab.errors import printable
from hyperslab.formats.files import lock_folder
from hyperslab.recipe.load import recipe_for
from hyperslab.recipe.trust import RUN_RECIPE, trust_of
from hyperslab.util.atomic_files import check_output
from hyperslab.util.logs import show_logs

if TYPE_CHECKING:
    from hyperslab.train.predict import InputOutcome


def predict_command(
    context: typer.Context,
    run: options.RunArgument,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Volumes of the kind that the run was trained on, or folders of them, and "
            "overrides such as grid.depth=2.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the results; created if missing.")],
    ranks: options.RanksOption = None,
    checkpoint: options.CheckpointOption = "best",
    native: Annotated[
        bool,
        typer.Option(
            "--native", help="Predict at the resolution of the files, not of the training."
        ),
    ] = False,
    window: options.WindowOption = None,
    overlap: options.OverlapOption = None,
    blend: options.BlendOption = None,
    format: Annotated[
        Literal["nifti", "hdf5", "zarr"], typer.Option(help="Format of masks; zarr: OME-Zarr.")
    ] = "nifti",
    trust: options.TrustOption = None,
) -> None:
    """Predict whole volumes, each cut over all ranks.

    A segmentation network writes OUT/NAME-mask.nii.gz on the voxels of its input; --format writes
    HDF5 or OME-Zarr instead. A regression network writes a row of OUT/parameters.csv. Inputs that
    cannot be read are named, the others are predicted, and the exit code is 1. Repeat the command
    to continue after an interruption. With --window, volumes are predicted in overlapping windows,
    each cut over all ranks; the result equals that of MONAI's sliding_window_inference. Start ranks
    with --ranks, or run this command on every rank under torchrun or srun.
    """
    windows = options.windows_of_options(window, overlap, blend)
    rank.adopt_rank()
    files, overrides = options.without_overrides(inputs)
    if not files:
        raise typer.BadParameter("give the files or folders to predict")
    trusted = trust_of(run / RUN_RECIPE, trust or ())
    # What is wrong before ranks have met would leave the others waiting: they are told.
    with rank.telling_ranks():
        recipe = recipe_for(
            run, overrides, ranks=ranks, axis="depth", replicas=False, trust=trusted
        )
        rank.check_ranks(recipe, ranks)
        if not rank.is_started():
            recipe.check_targets_exist("model")
            check_output(out, "--out")
            path = find_checkpoint(run, checkpoint)
            verify_checksums(path)
            checkpoint = str(path)  # else what is said of damaged ones would be said again
            from hyperslab.train import input_files  # numpy

            about = input_files.trained_on(path)
            input_files.check_prediction(recipe, about, windows, format)
            wanted = input_files.inputs_for(about, files, recipe.data)
            input_files.check_any_readable(wanted, about, recipe.data, native=native)
    from hyperslab.train.predict import predict

    with rank.exit_when_stopped():
        if not rank.is_rank(recipe):
            with lock_folder(out, "prediction"):
                pass  # else the logs of the one that is under way would be written over
            rank.launch_again(context, recipe, out / "logs")
            return
        work = partial(
            predict,
            run,
            files,
            out,
            checkpoint=checkpoint,
            native=native,
            windows=windows,
            format=format,
            overrides=overrides,
            trust=trusted,
        )
        predict_as_rank(work, out)


@rank.as_rank
def predict_as_rank(work: Callable[..., list[InputOutcome]], out: Path) -> None:
    """Predict as one rank; the main one shows how far it is.

    Raises:
        DataError: names the inputs that failed; the others are done.
    """
    from hyperslab.train.input_files import failed_inputs

    is_main = rank.become_rank()
    show_logs(is_main=is_main)
    with progress(is_main=is_main) as bar:
        task = bar.add_task("predict", total=None)
        outcomes = work(done=lambda _, total: bar.update(task, advance=1, total=total))
    if is_main:
        print(printable(_summary(outcomes, out)), flush=True)
    if failed := [outcome.reason for outcome in outcomes if outcome.state == "failed"]:
        raise failed_inputs(failed, len(outcomes))


def _summary(outcomes: Sequence[InputOutcome], out: Path) -> str:
    count = Counter(outcome.state for outcome in outcomes)
    return (
        f"{count['predicted'] + count['kept']} of {len(outcomes)} inputs in {out} "
        f"({count['predicted']} predicted, {count['kept']} kept)"
    )
