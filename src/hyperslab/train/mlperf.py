"""Writes MLPerf's log of a CosmoFlow run: lines ``:::MLLOG {...}`` in ``RUN/mlperf.log``.

The training tells `RunEvents` what happens; `MlperfLog` writes it down by MLPerf's own package.
Keys and their places are those of the HPC benchmark: mlperf_logging's rules hpc_3.0.0, and the
reference implementation [mlcommons/hpc, cosmoflow]. Epochs are counted from 1. Time runs from
before the data are opened to the end of the last validation.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from hyperslab.comm import Grid
from hyperslab.errors import HyperslabError
from hyperslab.models.cosmoflow import variant_of
from hyperslab.recipe.network import CosmoFlowSection
from hyperslab.recipe.optimizer import MlperfSection
from hyperslab.recipe.schedule import StepSchedule
from hyperslab.recipe.schema import Recipe
from hyperslab.util.optional_libraries import how_to_install

Part = Literal["EPOCH", "EVAL"]  # an epoch, or the validation in it, as MLPerf's keys have it


class RunEvents:
    """Hears on the main rank when something begins or ends; this one does nothing with it."""

    def data_opened(self, train: int, validation: int) -> None:
        """Note how many samples an epoch trains on, and how many it validates on."""

    def begins(self, part: Part, epoch: int) -> None:
        """Note a beginning in an epoch, counted from 0."""

    def ends(self, part: Part, epoch: int) -> None: ...

    def validated(self, epoch: int, measured: Mapping[str, float | None]) -> None: ...

    def run_ends(self, *, success: bool) -> None:
        """Note the end: a success if the goal was reached, or all epochs are done without one."""

    def close(self) -> None: ...


MLPERF_LOG = "mlperf.log"
BENCHMARK = "cosmoflow"


class MlperfLog(RunEvents):
    """Writes the log of a run; made when the ranks have found each other, before anything is read.

    A run that goes on adds to its log: what is to be there once is, and the pause counts.
    """

    def __init__(self, recipe: Recipe, grid: Grid) -> None:
        """Open the log, on the main rank only."""
        assert recipe.mlperf is not None
        library = import_mllog()
        self.keys = library.constants
        path = recipe.output / MLPERF_LOG
        self.goes_on = path.exists() and path.stat().st_size > 0
        self._handler = logging.FileHandler(path)
        self._handler.setFormatter(logging.Formatter("%(message)s"))
        own = logging.Logger("hyperslab.mlperf", logging.INFO)  # of this log alone
        own.addHandler(self._handler)
        self.log = library.MLLogger(
            own, default_stack_offset=1, root_dir=str(Path(__file__).parent)
        )
        if not self.goes_on:
            self._open(recipe, recipe.mlperf, grid)

    def _open(self, recipe: Recipe, about: MlperfSection, grid: Grid) -> None:
        keys = self.keys
        self.log.event(keys.CACHE_CLEAR, True)
        self.log.start(keys.INIT_START)
        self.log.event(keys.SUBMISSION_BENCHMARK, BENCHMARK)
        for word in ("ORG", "DIVISION", "STATUS", "PLATFORM"):
            self.log.event(getattr(keys, f"SUBMISSION_{word}"), getattr(about, word.lower()))
        for key, value in _hyper_parameters(recipe, grid).items():
            self.log.event(key, value)
        self.log.end(keys.INIT_STOP)
        self.log.start(keys.RUN_START)

    def data_opened(self, train: int, validation: int) -> None:
        if not self.goes_on:
            self.log.event(self.keys.TRAIN_SAMPLES, train)
            self.log.event(self.keys.EVAL_SAMPLES, validation)

    def begins(self, part: Part, epoch: int) -> None:
        self.log.start(getattr(self.keys, f"{part}_START"), metadata={"epoch_num": epoch + 1})

    def ends(self, part: Part, epoch: int) -> None:
        self.log.end(getattr(self.keys, f"{part}_STOP"), metadata={"epoch_num": epoch + 1})

    def validated(self, epoch: int, measured: Mapping[str, float | None]) -> None:
        error = measured.get("validation_mae")
        self.log.event("eval_error", error, metadata={"epoch_num": epoch + 1})

    def run_ends(self, *, success: bool) -> None:
        self.log.end(self.keys.RUN_STOP, metadata={"status": "success" if success else "aborted"})

    def close(self) -> None:
        """Close the log; nothing is written after that."""
        self._handler.close()


def import_mllog() -> Any:
    """Import MLPerf's module ``mllog`` and configure nothing in it, which would be so for all."""
    try:
        return importlib.import_module("mlperf_logging.mllog.mllog")
    except ImportError as error:
        raise HyperslabError(
            f"MLPerf's log needs its package ({error}): {how_to_install('mlperf')}\n"
            "    or train without: mlperf=null"
        ) from error


def _hyper_parameters(recipe: Recipe, grid: Grid) -> dict[str, Any]:
    """Return the hyper-parameters by MLPerf's keys.

    As in the reference the base rate is that after warm-up, and the one factor of the decay is the
    first one.
    """
    optimizer = recipe.optimizer
    schedule = optimizer.schedule
    steps = schedule.at if isinstance(schedule, StepSchedule) else {}
    on_nodes = int(os.environ.get("LOCAL_WORLD_SIZE", str(grid.size)))
    devices = torch.cuda.device_count() if grid.device.type == "cuda" else 0
    found = {
        "number_of_nodes": -(-grid.size // on_nodes),
        "accelerators_per_node": devices,
        "global_batch_size": recipe.data.batch_size * optimizer.accumulate,
        "gradient_accumulation_steps": optimizer.accumulate,
        "seed": recipe.seed,
        "opt_name": optimizer.name,
        "opt_base_learning_rate": optimizer.learning_rate,
        "opt_learning_rate_warmup_epochs": getattr(schedule, "warmup", 0),
        "opt_learning_rate_warmup_factor": 1.0,
        "opt_learning_rate_decay_boundary_epochs": sorted(steps),
        "opt_learning_rate_decay_factor": max(steps.values(), default=1.0),
    }
    if isinstance(recipe.model, CosmoFlowSection):
        own = recipe.model.dropout
        found["dropout"] = variant_of(recipe.model.variant, 128).dropout if own is None else own
    return found
