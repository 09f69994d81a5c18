"""The launches of one training: again after failures, if the user wants it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyperslab.checkpoint.retention import folder_of
from hyperslab.errors import HyperslabError, LayoutError
from hyperslab.launch.launcher import launch
from hyperslab.launch.restarts import Restarts
from hyperslab.planner.auto import GridChooser, chosen_overrides, planned_device
from hyperslab.recipe.schema import Recipe

log = logging.getLogger("hyperslab")


@dataclass(frozen=True, slots=True)
class TrainingLaunch:
    """Starts ``hyperslab arguments...`` on ranks of this machine until the training has ended.

    ``asked`` is the recipe as the user gave it, perhaps with ``grid: auto``, for which ``choose``
    chooses.
    """

    asked: Recipe
    arguments: Sequence[str]
    choose: GridChooser

    def until_done(self, recipe: Recipe, *, restarts: int, resume: bool) -> None:
        """Train on the grid of ``recipe``; after a failure so often again (see `Restarts`).

        Raises what `launch` does.
        """
        size = recipe.grid.size
        decide = Restarts(restarts, size, shrinks=self.asked.grid.auto, newest=self._newest)
        while True:
            try:
                self._launch(recipe, resume=resume)
                return
            except HyperslabError as error:
                ranks = decide.after(error)
                recipe = self._on(ranks, recipe, error)
                log.warning("%s", str(error).splitlines()[0])
            decide.ranks = recipe.grid.size
            resume = True
            start = f"{restarts - decide.left} of {restarts}"
            log.warning("restart %s on %d ranks, from the newest checkpoint", start, decide.ranks)

    def _launch(self, recipe: Recipe, *, resume: bool) -> None:
        words = chosen_overrides(recipe) if self.asked.grid.auto else []
        command = ["-m", "hyperslab", *self.arguments, *words, *(["--resume"] if resume else [])]
        limit = recipe.timeout
        launch(recipe.grid.size, command, recipe.output / "logs", limit=limit, patience=limit)

    def _on(self, ranks: int, recipe: Recipe, error: HyperslabError) -> Recipe:
        """The recipe with a grid of so many ranks, or of fewer if there is none.

        Raises:
            HyperslabError: this one, where there is none at all.
        """
        asked = self.asked
        if not asked.grid.auto:
            return recipe
        if planned_device(asked) == "cuda" and asked.device != "cuda-shared":
            ranks = min(ranks, torch.cuda.device_count())  # one may be gone
        if ranks == recipe.grid.size:
            return recipe
        for count in range(ranks, 0, -1):
            try:
                return self.choose(asked, count)
            except LayoutError:
                continue
        raise error

    def _newest(self) -> str | None:
        names = (path.name for path in folder_of(self.asked.output).glob("step-*"))
        return max(names, default=None)
