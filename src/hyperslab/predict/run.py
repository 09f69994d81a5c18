"""Predict with a trained network: whole volumes on the grid, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from hyperslab.comm import Grid
from hyperslab.comm.agreement import from_main, start_alike
from hyperslab.comm.start.last_words import last_words
from hyperslab.errors import RecipeError
from hyperslab.evaluate.evaluate import find_checkpoint, recipe_for
from hyperslab.evaluate.sliding_windows import WindowPolicy
from hyperslab.predict.inputs import list_inputs
from hyperslab.predict.network import Network
from hyperslab.predict.result_folder import InputOutcome, ResultFolder
from hyperslab.predict.windows import check_goes_with_windows
from hyperslab.recipe.compare import launch_facts
from hyperslab.recipe.schema import Recipe
from hyperslab.train.parts.given import NOTHING_GIVEN, Given


def predict(
    run: str | Path,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    checkpoint: str = "best",
    native: bool = False,
    windows: WindowPolicy | None = None,
    overrides: Sequence[str] = (),
    done: Callable[[InputOutcome, int], None] = lambda outcome, total: None,
    given: Given = NOTHING_GIVEN,
) -> list[InputOutcome]:
    """Predict files, and those in folders, with a run's network into the folder ``out``.

    Every rank calls it alike. Classes become a mask ``{name}-mask.nii.gz`` on the lattice of its
    file, numbers a row of ``parameters.csv``. What cannot be read is passed over and named. Files
    that this checkpoint has predicted into ``out`` before are kept.

    Args:
        checkpoint: see `hyperslab.evaluate.evaluate.evaluate`.
        native: predict at the file's own resolution, not at that of the training.
        windows: predict volumes in windows that overlap, each cut over all ranks.
        overrides: see `recipe_for`.
        done: called after every input, with the number of all.
        given: the network of a run that a program has trained.

    Raises:
        DataError: not a run's folder, no such checkpoint, nothing to predict, or ``out`` cannot
            be written.
        CheckpointError: the checkpoint is corrupt or of another network.
        RecipeError: an override is bad.
        LayoutError: the grid does not match the ranks.
    """
    recipe = recipe_of(Path(run), overrides)
    folder = Path(out)
    options = {
        "checkpoint": checkpoint,
        "native": native,
        "inputs": [str(i) for i in inputs],
        **({} if windows is None else windows.facts),
    }
    where = {"run": str(Path(run).absolute()), "out": str(folder.absolute())}
    facts = launch_facts(recipe, command="predict", **where, **options)
    started = start_alike(recipe.device, recipe.timeout, facts)
    try:
        with last_words():
            grid = Grid(**recipe.grid.model_dump())
            network = Network.of(recipe, find_checkpoint(Path(run), checkpoint), grid, given)
            channels = network.about.whole[0] if network.about.classes else 1
            entries = from_main(
                lambda: list_inputs([Path(path) for path in inputs], channels, recipe.data.mapping),
                failing="cannot list the inputs",
            )
            if windows is not None:
                check_goes_with_windows(network)
            results = ResultFolder(network, folder, native=native, windows=windows)
            outcomes = []
            for entry in entries:
                outcomes.append(results.predict(entry))
                done(outcomes[-1], len(entries))
            results.finish(entries)
    finally:
        if started:
            dist.destroy_process_group()
    return outcomes


def recipe_of(run: Path, overrides: Sequence[str], *, ranks: int | None = None) -> Recipe:
    """The run's recipe on a grid that cuts volumes only: by default along their depth.

    Raises:
        RecipeError: an override is bad or cuts mini-batches.
    """
    recipe = recipe_for(run, overrides, ranks=ranks, axis="depth")
    if recipe.grid.data == 1:
        return recipe
    if any(override.startswith("grid") for override in overrides):
        raise RecipeError(
            f"grid.data={recipe.grid.data}: volumes are predicted one after the other\n"
            "    use all ranks for each: grid.depth, grid.height, grid.width"
        )
    return recipe_for(run, [*overrides, f"grid.depth={recipe.grid.size}"])
