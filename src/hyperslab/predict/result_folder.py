"""The folder that a prediction fills: masks or a table of parameters, and the journal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hyperslab.atomic_files import write_csv
from hyperslab.comm.agreement import from_main
from hyperslab.data import Source, Subvolumes
from hyperslab.errors import DataError, LayoutError
from hyperslab.evaluate.sliding_windows import WindowPolicy
from hyperslab.formats.keyed.header import lbann_of
from hyperslab.formats.nifti.image import NIFTI_SUFFIXES as NIFTI
from hyperslab.formats.padded import fill_as, rounded_up
from hyperslab.formats.source import ScanOptions
from hyperslab.geometry import Box
from hyperslab.metrics.confusion import predicted_classes
from hyperslab.predict.inputs import ARRAYS, KEYED, Input, check_kind
from hyperslab.predict.journal import Journal, digest
from hyperslab.predict.network import Network
from hyperslab.predict.volumes import Keyed, Mapped, Nifti, Volume, read_block
from hyperslab.predict.windows import predict_windows
from hyperslab.tensor.main_rank import gather_to_main

PARAMETERS_FILE = "parameters.csv"


@dataclass(frozen=True, slots=True)
class InputOutcome:
    """What became of an input; ``reason`` says why it failed."""

    input: Input
    state: Literal["predicted", "kept", "failed"]
    reason: str = ""


class ResultFolder:
    """One run's network and the folder that it fills."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        *,
        native: bool,
        windows: WindowPolicy | None = None,
    ) -> None:
        """Every rank makes one; only the main rank keeps the journal.

        With ``windows`` volumes are predicted in parts, see `predict_windows`.

        Raises:
            DataError: the folder cannot be written.
        """
        self.network = network
        self.folder = folder
        self.native = native
        self.windows = windows
        self.fill = fill_as(network.transform.lowest, np.dtype(network.about.dtype))
        self.grid = network.grid
        self.about = network.about
        self.journal: Journal | None = None
        from_main(self._open, failing=f"cannot write into {folder}", error=DataError)

    def _open(self) -> None:
        of = self.network
        by = {
            "checkpoint": digest(of.checkpoint),
            "native": self.native,
            "precision": of.recipe.precision,
            "transform": of.transform.name,
            **({} if self.windows is None else self.windows.facts),
        }
        self.journal = Journal(self.folder, json.loads(json.dumps(by)))

    def predict(self, entry: Input) -> InputOutcome:
        """One input; every rank calls it and gets the same outcome."""
        try:
            if from_main(lambda: self._is_done(entry), failing=f"{entry.path}", error=DataError):
                return InputOutcome(entry, "kept")
            if self.about.classes:
                self._classes(entry)
            else:
                self._numbers(entry)
        except (DataError, LayoutError) as error:
            return InputOutcome(entry, "failed", str(error))
        return InputOutcome(entry, "predicted")

    def _is_done(self, entry: Input) -> bool:
        assert self.journal is not None
        there = not self.about.classes or (self.folder / entry.mask).exists()
        return there and self.journal.done(entry)

    def _classes(self, entry: Input) -> None:
        volume = self._open_volume(entry)
        if self.windows is None:
            mask = self._whole(volume, str(entry.path))
        else:
            mask = predict_windows(self.network, volume, self.windows, str(entry.path))
        path = self.folder / entry.mask

        def write() -> None:
            assert mask is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            volume.write(mask, path)
            self._note(entry)

        from_main(write, failing=f"cannot write {path}", error=DataError)

    def _whole(self, volume: Volume, where: str) -> NDArray[np.uint8] | None:
        """The mask (D, H, W) of a volume in one piece, on the main rank."""
        multiple = self.network.recipe.data.multiple or 1
        box = Box.whole(rounded_up(volume.shape, multiple))
        logits = self.network(volume.block(self.grid, box), box.shape, where)
        mask = gather_to_main(predicted_classes(logits))
        if mask is None:
            return None
        depth, height, width = volume.shape[1:]
        return mask[0, :depth, :height, :width]

    def _open_volume(self, entry: Input) -> Volume:
        name = entry.path.name
        native = self.native
        if name.endswith(NIFTI):
            return Nifti(entry.paths, self.about, native=native, fill=self.fill)
        return self._open_arrays(entry, native=native)

    def _open_arrays(self, entry: Input, *, native: bool) -> Keyed | Mapped:
        """A file of one of the layouts that are known, or of what the recipe says of its own."""
        data = self.network.recipe.data
        if data.mapping is None and not entry.path.name.endswith(ARRAYS):
            return self._open_keyed(entry, native=native)
        options = ScanOptions(data.channels, allowed=data.allowed, mapping=data.mapping)
        return Mapped(entry.paths, self.about, options, fill=self.fill)

    def _open_keyed(self, entry: Input, *, native: bool) -> Keyed:
        scans = NIFTI if self.about.classes else ()
        check_kind(entry.path, (*scans, *KEYED, *ARRAYS))
        data = self.network.recipe.data
        lbann = lbann_of(data.format)
        return Keyed(
            entry.path,
            self.about,
            native=native,
            channels=data.channels,
            lbann=lbann,
            allowed=data.allowed,
            fill=self.fill,
        )

    def _numbers(self, entry: Input) -> None:
        volume = self._open_arrays(entry, native=False)
        source: Source = volume.source
        width = self.network.recipe.data.subvolume
        source = source if width is None else Subvolumes(source, width)
        unit = []
        for sample in range(len(source.names)):
            box = Box.whole(rounded_up(source.shape, self.network.recipe.data.multiple or 1))
            block = read_block(source, sample, self.grid, box, self.fill)
            prediction = self.network(block, box.shape, source.where(sample))
            unit.append(prediction.full()[0].double().cpu().tolist())
        rows = dict(zip(source.names, unit, strict=True))
        from_main(
            lambda: self._note(entry, samples=rows),
            failing=f"cannot write {self.folder}",
            error=DataError,
        )

    def _note(self, entry: Input, **result: Any) -> None:
        assert self.journal is not None
        self.journal.add(entry, **result)

    def finish(self, entries: Sequence[Input]) -> None:
        """Write the table of parameters, where that is the result."""
        if not self.about.classes:
            words = f"cannot write into {self.folder}"
            from_main(lambda: self._tabulate(entries), failing=words, error=DataError)

    def _tabulate(self, entries: Sequence[Input]) -> None:
        """One line a sample: the normalised values and those in physical units."""
        assert self.journal is not None
        names = self.about.parameters.names
        kinds = [f"{kind}_{name}" for name in names for kind in ("predicted", "predicted_phys")]
        rows: list[list[object]] = []
        for row in (self.journal.rows[e.name] for e in entries if e.name in self.journal.rows):
            for sample, unit in row["samples"].items():
                physical = self.about.parameters.physical(np.array(unit)).tolist()
                pairs = zip(unit, physical, strict=True)
                rows.append([row["path"], sample, *(value for pair in pairs for value in pair)])
        write_csv(self.folder / PARAMETERS_FILE, ["file", "sample", *kinds], rows)
