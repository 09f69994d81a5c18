"""Runs `hyperslab predict`: writes masks or parameters of volumes, with a run's network."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
from hyperslab.cli.terminal import log_to_stdout, progress
from hyperslab.errors import DataError, printable
from hyperslab.recipe.trust import RUN_RECIPE, Trust, trust_of
from hyperslab.train.evaluate import recipe_for
from hyperslab.train.predict import InputOutcome, predict
from hyperslab.train.sliding_windows import WindowPolicy

OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=")


def predict_command(
    run: RunArgument,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files of volumes as the run was trained on, or folders of them; and key=value, "
            "such as grid.depth=2.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the results; made if missing.")],
    ranks: RanksOption = None,
    checkpoint: CheckpointOption = "best",
    native: Annotated[
        bool, typer.Option("--native", help="At the files' resolution, not the training's.")
    ] = False,
    window: WindowOption = None,
    overlap: OverlapOption = None,
    blend: BlendOption = None,
    trust: TrustOption = None,
) -> None:
    """Predict whole volumes, each cut over all ranks; also under torchrun and srun.

    A network of classes writes OUT/NAME-mask.nii.gz on the lattice of its input, one of numbers a
    row of OUT/parameters.csv. What cannot be read is named, the others are predicted, and the
    command exits with 1. Run it again to go on after a stop. With --window volumes are predicted in
    windows that overlap, each cut over all ranks, as MONAI's sliding_window_inference in serial.
    """
    windows = windows_of_options(window, overlap, blend)
    adopt_rank()
    files, overrides = _split(inputs)
    trusted = trust_of(run / RUN_RECIPE, trust or ())
    with telling_ranks():
        recipe = recipe_for(
            run, overrides, ranks=ranks, axis="depth", replicas=False, trust=trusted
        )
        check_ranks(recipe, ranks)
    options = ["--out", str(out), "--checkpoint", checkpoint, *(["--native"] if native else [])]
    options += [*options_of_windows(windows), *trusted.options]
    with exit_when_stopped():
        if is_rank(recipe):
            predict_as_rank(
                run,
                files,
                overrides,
                out=out,
                checkpoint=checkpoint,
                native=native,
                windows=windows,
                trust=trusted,
            )
            return
        arguments = ["predict", *options, "--", str(run), *files, *overrides]
        launch_command(recipe, arguments, out / "logs")


@as_rank
def predict_as_rank(
    run: Path,
    files: Sequence[str],
    overrides: Sequence[str],
    *,
    out: Path,
    checkpoint: str,
    native: bool,
    windows: WindowPolicy | None = None,
    trust: Trust | None = None,
) -> None:
    """Predict as one rank; the main one shows how far it is.

    Raises:
        DataError: names the inputs that failed; the others are done.
    """
    is_main = become_rank()
    log_to_stdout(logging.WARNING)
    shown = Console() if is_main else Console(file=io.StringIO())  # standard error goes to a log
    with progress(shown) as bar:
        task = bar.add_task("predict", total=None)
        outcomes = predict(
            run,
            files,
            out,
            checkpoint=checkpoint,
            native=native,
            windows=windows,
            overrides=overrides,
            trust=trust,
            done=lambda _, total: bar.update(task, advance=1, total=total),
        )
    if is_main:
        print(printable(_summary(outcomes, out)), flush=True)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if failed:
        reasons = "\n".join(f"    {outcome.reason}" for outcome in failed)
        raise DataError(f"{len(failed)} of {len(outcomes)} inputs failed\n{reasons}")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell inputs from overrides: what looks like one and is no file."""
    overrides = [a for a in arguments if OVERRIDE.match(a) and not Path(a).exists()]
    files = [argument for argument in arguments if argument not in overrides]
    if not files:
        raise typer.BadParameter("give the files or folders to predict")
    return files, overrides


def _summary(outcomes: Sequence[InputOutcome], out: Path) -> str:
    count = Counter(outcome.state for outcome in outcomes)
    return (
        f"{count['predicted'] + count['kept']} of {len(outcomes)} inputs in {out} "
        f"({count['predicted']} predicted, {count['kept']} kept)"
    )
