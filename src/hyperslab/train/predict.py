"""Predicts whole volumes with a trained network, each of them cut over all ranks.

In reading order: `TrainedNetwork` predicts from each rank's box of a volume, whole or in sliding
windows; the `Journal` notes in a file that survives a stop which inputs are done (one line that
says by which network, then one line for each input); `ResultFolder` fills a folder with masks or
a table of parameters; `predict` does so for a run and a grid.

A window may be larger than one device has room for. No rank holds a whole volume, its scores or
its mask: each sums up the scores of its part of a few layers, and writes their classes to a file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.checkpoint.files import MANIFEST
from hyperslab.checkpoint.run_state import DataCard
from hyperslab.checkpoint.save_load import load, on_main
from hyperslab.comm import Grid
from hyperslab.comm.agreement import broadcast_from_main, collective_try
from hyperslab.data.assemble import check_values
from hyperslab.data.transforms import Transform, decode, transform_of
from hyperslab.errors import DataError, LayoutError, RecipeError, system_errors_as
from hyperslab.formats.files import Stamp, lock_folder
from hyperslab.formats.nifti.image import Mask
from hyperslab.formats.views import fill_as, rounded_up, selected
from hyperslab.geometry import Box
from hyperslab.recipe.load import recipe_for
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.trust import Trust
from hyperslab.tensor import Sharded
from hyperslab.train import input_files, mask_files
from hyperslab.train.builders import build_model
from hyperslab.train.evaluate import find_checkpoint, started_ranks
from hyperslab.train.input_files import InputFile
from hyperslab.train.input_volumes import ArrayVolume, NiftiVolume, block_of_sample, open_volume
from hyperslab.train.metrics import predicted_classes
from hyperslab.train.moving_average import use_averages
from hyperslab.train.network import NO_USER_OBJECTS, UserObjects, outputs_of
from hyperslab.train.samples import WindowPolicy
from hyperslab.train.sliding_windows import blended_layers
from hyperslab.train.step import autocast
from hyperslab.train.uncertainty import moments_of, spread_columns
from hyperslab.util import atomic_files
from hyperslab.util.documents import read_json_lines

T = TypeVar("T")

log = logging.getLogger("hyperslab")


@dataclass(frozen=True, slots=True)
class TrainedNetwork:
    """A run's network; the run's data need not be there any more."""

    recipe: Recipe
    about: DataCard
    model: torch.nn.Module
    grid: Grid
    checkpoint: Path
    transform: Transform

    @classmethod
    def of(
        cls, recipe: Recipe, checkpoint: Path, grid: Grid, given: UserObjects = NO_USER_OBJECTS
    ) -> TrainedNetwork:
        """Every rank calls it.

        Raises:
            CheckpointError: the checkpoint is corrupt or of another network.
            DataError: it does not say what the network was trained on.
            RecipeError: the recipe's network is not for such volumes, or cannot be made.
        """
        about = on_main(partial(input_files.trained_on, checkpoint), f"cannot read {checkpoint}")
        try:
            model = build_model(recipe, about, grid, given)
        except RecipeError as error:
            if not str(error).startswith(recipe.data.where):
                raise
            # What the data hold was read from the checkpoint: it may be the one that is wrong.
            raise RecipeError(f"by {checkpoint} {error}") from None
        use_averages(model, load(checkpoint, model).get("ema"), checkpoint)
        transform = transform_of(about.classes, recipe.data.transform, recipe.data.window)
        return cls(recipe, about, model.eval(), grid, checkpoint, transform)

    @torch.no_grad()
    def __call__(self, block: NDArray[Any], shape: tuple[int, ...], where: str) -> Sharded:
        """Predict one volume (C, D, H, W), of which ``block`` is this rank's box.

        Nothing is gathered: each layer holds what its rank's box needs. ``where`` names the volume.

        Raises:
            DataError: on every rank: values that cannot be right, or the network does not take
                extents like those of the volume.
            LayoutError: the volume is too small for the grid or the network.
        """
        collective_try(lambda: check_values(block, self.transform, where), failing=where)
        values = torch.from_numpy(block).to(self.grid.device)
        x = decode(values, self.transform, torch.float32, shape, self.grid)
        x = Sharded.from_local(x, self.grid.partition((1, *shape)), self.grid)
        try:
            with autocast(self.grid.device, self.recipe.precision):
                prediction: Sharded = self.model(x)
        except RecipeError as error:  # of this volume, whatever those of the training were
            raise DataError(f"{where}: {error}") from error
        return prediction


def predict_mask(
    network: TrainedNetwork,
    volume: NiftiVolume | ArrayVolume,
    windows: WindowPolicy | None,
    where: str,
    first: int = 0,
) -> Iterator[tuple[Box, Mask]]:
    """Yield the classes (d, h, w) of boxes of a volume, this rank's; all ranks get as many.

    Without ``windows`` one, which the grid gives this rank; else layers as they are final, of the
    part that `strips` gives it, from the layer ``first`` on.

    Raises:
        DataError: on every rank: values that cannot be right, or the extra ``medical`` is missing.
        LayoutError: a window, or the volume, is too small for the grid or the network.
    """
    grid = network.grid
    channels, *extents = volume.shape
    if windows is None:
        box = Box.whole(rounded_up(volume.shape, network.recipe.data.multiple or 1))
        found = predicted_classes(network(volume.block(grid, box), box.shape, where))
        own = found.partition.box(grid.coords)
        own = Box(own.lo[1:], own.hi[1:])
        inside = own.intersect(Box.whole(extents))
        if not found.partition.is_first_copy(grid.coords):
            inside = Box(inside.lo, inside.lo)
        yield inside, found.local[0].cpu().numpy()[inside.slices(own)]
        return

    def predict_window(box: Box) -> Sharded:
        wanted = Box((0, *box.lo), (channels, *box.hi))
        return network(volume.block(grid, wanted), wanted.shape, where)

    owners = mask_files.strips(extents, grid.size)
    layers = blended_layers(tuple(extents), windows, predict_window, owners, grid, first)
    for box, scores in layers:
        classes = np.empty(box.shape, np.uint8)
        for layer in range(0 if box.empty else box.shape[0]):  # the numbers of classes are int64
            classes[layer] = scores[:, layer].argmax(0).numpy()
        yield box, classes


JOURNAL = "predictions.jsonl"

READING_KEYS = {"channels", "files", "format", "keys", "multiple", "subvolume"}
"""Keys of a recipe's data by which inputs are read."""

JournalRow = dict[str, Any]

UNDER_WAY = "layers"
"""In a journal's row: the layers of a mask that are written while it is not finished."""


class Journal:
    """The inputs that a network has predicted into ``folder``; on the main rank only.

    Results of another network, or of another way of reading, do not count as done.
    """

    def __init__(self, folder: Path, by: JournalRow) -> None:
        """``by`` says what the results depend on besides the inputs.

        Raises:
            DataError: the folder cannot be written.
        """
        self.path = folder / JOURNAL
        lines: list[JournalRow] = []
        with suppress(OSError, ValueError):  # a foreign file has none
            lines = read_json_lines(self.path)[0]
        first, *rows = lines or [{}]
        listed = {row["name"]: row for row in rows if _is_row(row)}
        if listed and first != by:
            log.warning(
                "%s holds %d results of another network, or of other options: they no longer "
                "count, and are replaced for the inputs that are given now",
                folder,
                len(listed),
            )
        self.rows: dict[str, JournalRow] = listed if first == by else {}
        with system_errors_as(DataError, f"cannot write into {folder}", named=False):
            folder.mkdir(parents=True, exist_ok=True)
            atomic_files.write_bytes(self.path, atomic_files.json_lines([by, *self.rows.values()]))

    def done(self, entry: InputFile) -> bool:
        """Check whether this very file is done."""
        row = self._row(entry)
        return row is not None and UNDER_WAY not in row

    def layers(self, entry: InputFile) -> int:
        """Return how many layers of this very file's mask were written before a stop."""
        layers: int = (self._row(entry) or {}).get(UNDER_WAY, 0)
        return layers

    def _row(self, entry: InputFile) -> JournalRow | None:
        row = self.rows.get(entry.name)
        state = state_of_input(entry)
        if row is None or not state:
            return None
        return row if all(row.get(key) == value for key, value in state.items()) else None

    def add(self, entry: InputFile, state: JournalRow, **result: Any) -> None:
        """Note that an input is done, with its result where that is not a file.

        ``state`` is what `state_of_input` said before the input was opened: what has changed since
        is not what was predicted.
        """
        row = {"name": entry.name, **state, **result}
        self.rows[entry.name] = row
        atomic_files.append_whole(self.path, atomic_files.json_lines([row]))


def _is_row(row: Any) -> bool:
    """Check the kinds of what is looked up in a line of a journal."""
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        return False
    samples = row.get("samples", {})
    if type(row.get(UNDER_WAY, 0)) is not int or not isinstance(samples, dict):
        return False
    return all(isinstance(numbers, list) for numbers in samples.values()) and all(
        type(number) is float for numbers in samples.values() for number in numbers
    )


def state_of_input(entry: InputFile) -> JournalRow:
    """Return what tells an input from its other versions; nothing where a file is missing."""
    if not all(path.exists() for path in entry.paths):
        return {}
    first, *others = map(Stamp.of, entry.paths)
    path = str(entry.path.absolute())
    found: JournalRow = {"path": path, "bytes": first.size, "modified": first.modified}
    if others:
        found["channels"] = [[one.size, one.modified] for one in others]
    return found


PARAMETERS_FILE = "parameters.csv"


@dataclass(frozen=True, slots=True)
class InputOutcome:
    """Says what became of an input; ``reason`` tells why it failed."""

    input: InputFile
    state: Literal["predicted", "kept", "failed"]
    reason: str = ""


@dataclass(eq=False)
class ResultFolder:
    """Fills a folder with what one run's network predicts; every rank makes one.

    With ``windows`` volumes are predicted in parts, see `predict_mask`. Masks are written in the
    ``format``.

    Raises:
        DataError: the folder cannot be written.
    """

    network: TrainedNetwork
    folder: Path
    native: bool
    windows: WindowPolicy | None = None
    format: mask_files.MaskFormat = "nifti"
    journal: Journal = field(init=False)  # on the main rank alone

    def __post_init__(self) -> None:
        self.about = self.network.about
        self.grid = self.network.grid
        self.fill = fill_as(self.network.transform.lowest, np.dtype(self.about.dtype))
        self._on_main(self._open)

    def _on_main(self, make: Callable[[], T]) -> T:
        """Return on every rank what the main one makes, or raise that it cannot write here."""
        return broadcast_from_main(make, failing=f"cannot write into {self.folder}")

    def _open(self) -> None:
        of = self.network
        data = of.recipe.data
        reading = data.model_dump(mode="json", include=READING_KEYS, exclude_defaults=True)
        by = {
            # One checkpoint is told from another by the checksums of its files.
            "checkpoint": hashlib.sha256((of.checkpoint / MANIFEST).read_bytes()).hexdigest(),
            # The same weights give other numbers in another network, such as one of other slopes.
            "model": of.recipe.model.model_dump(mode="json", exclude_defaults=True),
            "native": self.native,
            "precision": of.recipe.precision,
            "transform": of.transform.name,
            **({} if self.windows is None else self.windows.facts),
            **({} if self.format == "nifti" else {"format": self.format}),
            **({"data": reading} if reading else {}),
        }
        self.journal = Journal(self.folder, json.loads(json.dumps(by)))

    def predict(self, entry: InputFile) -> InputOutcome:
        """Predict one input; every rank calls it and gets the same outcome."""
        try:
            done, state = broadcast_from_main(
                lambda: (self._is_done(entry), state_of_input(entry)),
                failing=f"{entry.path}",
            )
            if done:
                return InputOutcome(entry, "kept")
            if self.about.classes:
                self._classes(entry, state)
            else:
                self._numbers(entry, state)
        except (DataError, LayoutError) as error:
            return InputOutcome(entry, "failed", str(error))
        return InputOutcome(entry, "predicted")

    def _is_done(self, entry: InputFile) -> bool:
        if not self.journal.done(entry):
            return False
        if self.about.classes:
            return self._mask_path(entry).exists()
        return self._has_numbers(self.journal.rows[entry.name])

    def _has_numbers(self, row: JournalRow) -> bool:
        samples = row.get("samples", {})
        count = outputs_of(self.about, self.network.recipe.loss)
        return bool(samples) and all(len(numbers) == count for numbers in samples.values())

    def _classes(self, entry: InputFile, state: JournalRow) -> None:
        path = self._mask_path(entry)
        volume = open_volume(
            entry,
            self.about,
            self.network.recipe.data,
            self.grid,
            path.parent,
            native=self.native,
            fill=self.fill,
        )
        with closing(volume):
            shape = volume.shape[1:]
            under_way = atomic_files.partial_path(self.folder / f"{entry.name}-mask.bytes")
            begun = self._on_main(lambda: self._begun(entry, state, under_way, shape))
            mask = mask_files.MaskBytes(under_way, shape, begun)
            with closing(mask):
                try:
                    self._fill(mask, entry, state, volume)
                    found = mask_files.FinishedMask(
                        mask, volume.extents, self.about.classes, volume.affine
                    )
                    mask_files.publish(found, path, self.format, self.grid, volume.write)
                except (DataError, LayoutError):
                    broadcast_from_main(mask.remove)
                    raise
                self._on_main(lambda: self.journal.add(entry, state))
                broadcast_from_main(mask.remove)

    def _fill(
        self,
        mask: mask_files.MaskBytes,
        entry: InputFile,
        state: JournalRow,
        volume: NiftiVolume | ArrayVolume,
    ) -> None:
        """Predict what is not yet written of a mask; what is, is noted for a run after a stop."""
        depth = mask.shape[0]
        if mask.kept == depth:
            return
        where = str(entry.path)
        parts = predict_mask(self.network, volume, self.windows, where, mask.kept)
        for box, classes in parts:
            collective_try(partial(mask.write, box, classes), failing=f"cannot write {mask.path}")
            done = depth if self.windows is None else box.hi[0]  # the main rank has all layers
            self._on_main(partial(self._note_layers, entry, state, done))

    def _begun(
        self, entry: InputFile, state: JournalRow, under_way: Path, shape: tuple[int, ...]
    ) -> int:
        """Return how many layers a stopped run has left; where there are none, the journal says so.

        It says so before there is a new file, whose bytes would pass for theirs after a stop.
        """
        mask_files.check_replaceable(self._mask_path(entry), self.format)
        layers = self.journal.layers(entry)
        if layers and mask_files.has_bytes(under_way, shape):
            return layers
        if UNDER_WAY in self.journal.rows.get(entry.name, {}):
            self._note_layers(entry, state, 0)
        return 0

    def _note_layers(self, entry: InputFile, state: JournalRow, done: int) -> None:
        self.journal.add(entry, state, **{UNDER_WAY: done})

    def _mask_path(self, entry: InputFile) -> Path:
        return self.folder / f"{entry.name}{input_files.MASK_SUFFIXES[self.format]}"

    def _numbers(self, entry: InputFile, state: JournalRow) -> None:
        data = self.network.recipe.data
        volume = open_volume(entry, self.about, data, self.grid, self.folder, fill=self.fill)
        assert isinstance(volume, ArrayVolume)
        source = selected(volume.source, None, None, data.subvolume)
        unit = []
        for sample in range(len(source.names)):
            box = Box.whole(rounded_up(source.shape, data.multiple or 1))
            block = block_of_sample(source, sample, self.grid, box, self.fill)
            prediction = self.network(block, box.shape, source.where(sample))
            unit.append(prediction.full()[0].double().cpu().tolist())
        rows = dict(zip(source.names, unit, strict=True))
        self._on_main(lambda: self.journal.add(entry, state, samples=rows))

    def finish(self, entries: Sequence[InputFile]) -> None:
        """Write the table of parameters, where that is the result."""
        if not self.about.classes:
            self._on_main(lambda: self._tabulate(entries))

    def _tabulate(self, entries: Sequence[InputFile]) -> None:
        """Write one line a sample: the normalised values and those in physical units.

        Last come `spread_columns`, where the network predicts a covariance.

        What earlier commands have predicted stays, before the ``entries`` of this one. Files are
        relative to this folder; samples of one name have that of their file before it.
        """
        parameters = self.about.parameters
        names = parameters.names
        kinds = [f"{kind}_{name}" for name in names for kind in ("predicted", "predicted_phys")]
        asked = {entry.name for entry in entries}
        done = [row for name, row in self.journal.rows.items() if name not in asked]
        done = [row for row in done if isinstance(row.get("path"), str) and self._has_numbers(row)]
        done += [self.journal.rows[entry.name] for entry in entries if self._is_done(entry)]
        often = Counter(sample for row in done for sample in row["samples"])
        rows: list[list[object]] = []
        further: dict[str, float] = {}
        for row in done:
            file = os.path.relpath(row["path"], self.folder.absolute())
            for sample, outputs in row["samples"].items():
                name = sample if often[sample] == 1 else f"{row['name']}:{sample}"
                unit, covariance = moments_of(np.array([outputs]), len(names))
                pairs = np.stack([unit[0], parameters.physical(unit[0])], axis=1)
                spread = spread_columns(parameters, covariance)
                further = {key: values.item() for key, values in spread.items()}
                rows.append([file, name, *pairs.ravel().tolist(), *further.values()])
        head = ["file", "sample", *kinds, *further]
        atomic_files.write_csv(self.folder / PARAMETERS_FILE, head, rows)


def predict(
    run: str | Path,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    checkpoint: str = "best",
    native: bool = False,
    windows: WindowPolicy | None = None,
    format: mask_files.MaskFormat = "nifti",
    overrides: Sequence[str] = (),
    done: Callable[[InputOutcome, int], None] = lambda outcome, total: None,
    given: UserObjects = NO_USER_OBJECTS,
    trust: Trust | None = None,
) -> list[InputOutcome]:
    """Predict files, and those in folders, with a run's network into the folder ``out``.

    Every rank calls it alike. Classes become a mask ``{name}-mask.nii.gz`` on the lattice of its
    file, numbers a row of ``parameters.csv``. What cannot be read is passed over and named. Files
    that this checkpoint has predicted into ``out`` before are kept, and a mask that was under way
    goes on where it was. No rank holds a whole volume, its scores or its mask.

    Args:
        checkpoint: see `hyperslab.train.evaluate.evaluate`.
        native: predict at the file's own resolution, not at that of the training.
        windows: predict volumes in windows that overlap, each cut over all ranks.
        format: of masks: ``"nifti"``, ``"hdf5"`` (``{name}-mask.hdf5``, ``segmentation``) or
            ``"zarr"`` (``{name}-mask.zarr``, OME-Zarr of several levels).
        overrides: see `recipe_for`.
        done: called after every input, with the number of all.
        given: the network of a run that a program has trained.
        trust: see `load_recipe`.

    Raises:
        DataError: not a run's folder, no such checkpoint, nothing to predict, or ``out`` cannot
            be written or another prediction fills it.
        CheckpointError: the checkpoint is corrupt or of another network.
        RecipeError: an override is bad.
        LayoutError: the grid does not match the ranks.
    """
    recipe = recipe_for(Path(run), overrides, axis="depth", replicas=False, trust=trust)
    folder = Path(out)
    options = {
        "checkpoint": checkpoint,
        "native": native,
        "format": format,
        "inputs": [str(i) for i in inputs],
        "out": str(folder.absolute()),
    }
    with started_ranks(recipe, "predict", Path(run), windows, **options) as grid:
        network = TrainedNetwork.of(recipe, find_checkpoint(Path(run), checkpoint), grid, given)
        input_files.check_prediction(recipe, network.about, windows, format)
        entries = broadcast_from_main(
            lambda: input_files.inputs_for(network.about, inputs, recipe.data),
            failing="cannot list the inputs",
        )
        with ExitStack() as stack:
            # Two would write one mask of two networks, or a table without the other's rows.
            broadcast_from_main(lambda: stack.enter_context(lock_folder(folder, "prediction")))
            results = ResultFolder(network, folder, native=native, windows=windows, format=format)
            outcomes = []
            for entry in entries:
                outcomes.append(results.predict(entry))
                done(outcomes[-1], len(entries))
            results.finish(entries)
    return outcomes
