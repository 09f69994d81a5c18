"""`TrainedRun`: the folder of a run, to be evaluated, predicted with and reported by a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from hyperslab.comm.agreement import from_main
from hyperslab.evaluate.evaluate import evaluate
from hyperslab.evaluate.regression import Evaluation
from hyperslab.evaluate.segmentation import ClassEvaluation
from hyperslab.evaluate.sliding_windows import WindowPolicy
from hyperslab.formats.source import Source
from hyperslab.predict.result_folder import InputOutcome
from hyperslab.predict.run import predict
from hyperslab.report import write_report
from hyperslab.train.parts.given import Given

T = TypeVar("T")


class TrainedRun:
    """A run's folder, with what a program has handed in where no recipe can name it.

    ``model``: the network, or one built alike; it may be parallelised. ``data``: the source that
    it was trained on. Neither is needed where the recipe names them, as ``hyperslab train`` has it.
    Every rank calls the methods alike.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: torch.nn.Module | None = None,
        data: Source | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.given = Given(model=model, source=data)

    def evaluate(
        self,
        *,
        checkpoint: str = "best",
        split: str = "test",
        overrides: Sequence[str] = (),
        calibrate: bool = False,
        windows: WindowPolicy | None = None,
    ) -> Evaluation | ClassEvaluation:
        """As ``hyperslab evaluate``; see `hyperslab.evaluate.evaluate.evaluate`."""
        return self._with_own_weights(
            lambda: evaluate(
                self.folder,
                checkpoint=checkpoint,
                split=split,
                overrides=overrides,
                calibrate=calibrate,
                windows=windows,
                given=self.given,
            )
        )

    def predict(
        self,
        inputs: Sequence[str | Path],
        out: str | Path,
        *,
        checkpoint: str = "best",
        native: bool = False,
        windows: WindowPolicy | None = None,
        overrides: Sequence[str] = (),
    ) -> list[InputOutcome]:
        """As ``hyperslab predict``; see `hyperslab.predict.run.predict`."""
        return self._with_own_weights(
            lambda: predict(
                self.folder,
                inputs,
                out,
                checkpoint=checkpoint,
                native=native,
                windows=windows,
                overrides=overrides,
                given=self.given,
            )
        )

    def report(self) -> Path:
        """As ``hyperslab report``: the path of the page, which the main rank writes."""
        return from_main(lambda: write_report(self.folder))

    def _with_own_weights(self, work: Callable[[], T]) -> T:
        """Let a handed-in network keep its weights and its mode."""
        if self.given.model is None:
            return work()
        with _kept(self.given.model):
            return work()


@contextmanager
def _kept(model: torch.nn.Module) -> Iterator[None]:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    training = model.training
    try:
        yield
    finally:
        model.load_state_dict(state)
        model.train(training)
