"""Writes the chapter on volumes: a universe and how the grid cuts it, or scans with their masks.

In reading order: the volumes of a run's data set; how large their voxels are and where their axes
point, as far as the files say so; the middle planes of one universe, or the planes of scans with
their true and their predicted classes; how they are drawn, in the true shape of their voxels, with
a scale, a colour bar and letters of the patient's sides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from shlex import quote
from typing import Any

import matplotlib as mpl
import matplotlib.patheffects as effects
import numpy as np
from matplotlib import ticker
from matplotlib.colors import to_rgba
from numpy.typing import NDArray
from pydantic import ValidationError

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.data import Source
from hyperslab.errors import DataError, HyperslabError
from hyperslab.formats.files import Refuse
from hyperslab.formats.registry import scanned
from hyperslab.formats.source import Extras, SourceView
from hyperslab.formats.targets import LIVER
from hyperslab.formats.views import selected
from hyperslab.geometry import Box, Cut, Window
from hyperslab.models.cosmoflow import variant_of
from hyperslab.recipe.data import DataSection
from hyperslab.recipe.trust import NO_TRUST, leave_out_liberties
from hyperslab.simulate.parameters import FIDUCIAL_H_0
from hyperslab.studies.report.canvas import FIGURE_STYLE, Canvas, Picture
from hyperslab.studies.report.html import Block, Chapter, Figures, Heading, Legend, Notice
from hyperslab.studies.run_folder import TEST, Run
from hyperslab.studies.table import number, times
from hyperslab.train.evaluate import MASKS_SHOWN
from hyperslab.util.documents import open_plain

DATA_KEYS = (
    *("path", "synthetic", "format", "channels", "redshifts", "targets", "subvolume"),
    *("files", "keys", "table", "columns", "ranges", "classes", "outside_files", "missing_chunks"),
    "window",
)
"""Lists the keys of a recipe's data that say what a volume is; a report runs no plugins."""


def volumes_of(run: Run, refuse: Refuse = lambda error: None) -> Source:
    """Opens a run's volumes as it saw them; ``refuse`` gets the errors of files that are not so."""
    if made := run.setting("data.target") or run.setting("data.python_class"):
        raise DataError(f"its volumes come from {made}, which a report does not run")
    said = {key: run.setting(f"data.{key}") for key in DATA_KEYS}
    # A page on somebody else's run must not read other files of the user's.
    leave_out_liberties(NO_TRUST, {"data": said}, {}, run.recipe)
    if said["path"] is None and said["synthetic"] is None:
        raise DataError("its volumes are where data.train says, not in one folder data.path")
    given = {key: value for key, value in said.items() if value is not None}
    try:
        data = DataSection.model_validate({"batch_size": 1, **given})
    except ValidationError as error:
        raise DataError(f"{run.path / 'recipe.yaml'}: data: {error}") from None
    if data.path is None:
        return data.chosen_volumes()
    if not os.path.exists(data.path):  # False for names that no system takes, too
        raise DataError(f"{data.path} is not a folder of volumes now")
    source, _ = scanned(data.path, replace(data.scan_options, refuse=refuse))
    return selected(source, data.redshifts, data.targets, data.subvolume)


DIRECTIONS = (("L", "R"), ("P", "A"), ("I", "S"))
"""Names the ends of x, y, z in RAS+: left, right, posterior, anterior, inferior, superior."""


@dataclass(frozen=True, slots=True)
class Voxels:
    """Holds a voxel's size by axis in ``unit``, which is empty where voxels are counted.

    ``ends``: by axis, the letters of the patient's sides where it begins and ends; empty where
    they are not known.
    """

    sizes: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(SPATIAL_AXES, 1.0))
    unit: str = ""
    ends: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def title(self, axis: str) -> str:
        """Writes the title of a picture's axis, such as ``height [mm]``."""
        return f"{axis} [{self.unit}]" if self.unit else axis


def voxels_of(source: Source, sample: int) -> Voxels:
    """Finds a sample's voxels by the file's affine [mm], or by a simulated universe's side."""
    while isinstance(source, SourceView):  # its samples have the voxels of the whole
        source, sample = source.origin(sample)
    extras = source.extras(sample)
    if extras.affine is not None:
        return voxels_of_affine(extras.affine)
    side = _universe_side(extras)
    if side is None:
        return Voxels()
    extents = zip(SPATIAL_AXES, source.shape_of(sample)[1:], strict=True)
    return Voxels({axis: side / extent for axis, extent in extents}, "Mpc/h")


def voxels_of_affine(affine: object) -> Voxels:
    """Reads sizes and ends off an affine (d, h, w, 1) to (x, y, z, 1) [mm], RAS+.

    >>> voxels_of_affine([[0, 0, -2, 0], [0, 1, 0, 0], [5, 0, 0, 0], [0, 0, 0, 1]]).ends["width"]
    ('R', 'L')
    """
    turns = np.asarray(affine, np.float64)[:3, :3]
    sizes = np.linalg.norm(turns, axis=0)
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        return Voxels()
    ends = {}
    for axis, column in zip(SPATIAL_AXES, turns.T, strict=True):
        main = int(np.abs(column).argmax())
        low, high = DIRECTIONS[main]
        ends[axis] = (low, high) if column[main] > 0 else (high, low)
    return Voxels(dict(zip(SPATIAL_AXES, sizes.tolist(), strict=True)), "mm", ends)


def _universe_side(extras: Extras) -> float | None:
    """Computes the side [Mpc/h] that `hyperslab simulate` notes, for this universe's own H_0."""
    box = extras.attributes.get("box_size")
    physical = extras.arrays.get("physPar")
    if not isinstance(box, (int, float)) or physical is None or "H_0" not in extras.names:
        return None
    side = float(box) * float(physical[extras.names.index("H_0")]) / FIDUCIAL_H_0
    return side if np.isfinite(side) and side > 0 else None


PlaneValues = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Planes:
    """Holds the three planes of a volume that cross at a voxel, each by the axis it is across.

    ``values["depth"]`` is (height, width), and so on, of what ``quantity`` says; ``at`` is where
    the planes lie.
    """

    sample: str
    shape: tuple[int, ...]
    at: Mapping[str, int]
    values: Mapping[str, PlaneValues]
    voxels: Voxels
    quantity: str


@dataclass(frozen=True, slots=True)
class Scan(Planes):
    """Holds planes of a scan, and the classes there that are true and that were predicted."""

    true: Mapping[str, PlaneValues]
    predicted: Mapping[str, PlaneValues]


def middle_planes(run: Run) -> Planes:
    """Reads the three middle planes of one sample, first channel; of counts log(1 + count)."""
    with closing(volumes_of(run)) as source:
        extents = zip(SPATIAL_AXES, source.shape_of(0)[1:], strict=True)
        planes = _planes_through(source, 0, {axis: extent // 2 for axis, extent in extents})
    counts = source.dtype.kind in "iu"
    if not (counts or min(float(plane.min()) for plane in planes.values.values()) >= 0):
        return planes  # some are below zero, or no numbers
    values = {axis: np.log1p(plane.clip(min=0)) for axis, plane in planes.values.items()}
    return replace(planes, values=values, quantity="log(1 + count)" if counts else "log(1 + value)")


def _planes_through(source: Source, sample: int, at: Mapping[str, int]) -> Planes:
    """Reads the first channel's planes that cross at a voxel."""
    shape = source.shape_of(sample)[1:]
    values = {}
    for dim, axis in enumerate(SPATIAL_AXES, start=1):
        lo = [0, 0, 0, 0]
        hi = [1, *shape]
        lo[dim] = at[axis]
        hi[dim] = at[axis] + 1
        plane = source.read(sample, Box(tuple(lo), tuple(hi))).squeeze((0, dim))
        values[axis] = plane.astype(np.float64)
    return Planes(source.names[sample], shape, at, values, voxels_of(source, sample), "value")


def scans(run: Run) -> list[Scan]:
    """Reads the scans whose masks the evaluation has kept; none if it has kept none."""
    path = run.path / "evaluation" / "masks.npz"
    if not path.exists():
        return []
    try:
        # Sizes are looked at before anything is unpacked: a few bytes may stand for gigabytes.
        with open_plain(path) as opened, np.lib.npyio.NpzFile(opened) as file:
            assert file.zip is not None
            if file.zip.getinfo("samples.npy").file_size > MOST_NAMES:
                raise ValueError("its samples have very long names")
            samples = [str(sample) for sample in file["samples"].tolist()]
            if len(samples) > MASKS_SHOWN:
                raise ValueError(f"it names {len(samples)} samples; {MASKS_SHOWN} are kept")
            refused: list[DataError] = []
            with closing(volumes_of(run, refused.append)) as source:
                if gone := [sample for sample in samples if sample not in source.names]:
                    raise _missing(run, gone[0], refused)
                read = partial(_read_scan, source, file, samples)
                return [*map(read, range(len(samples)))]
    except HyperslabError:
        raise
    except Exception as error:  # damaged bytes can raise anything, and stand for any size
        raise DataError(f"{path} holds no masks: {error}") from error


def _missing(run: Run, sample: str, refused: Sequence[DataError]) -> DataError:
    """Makes the error of a sample that is not there: that of its file, or of its whole's."""
    whole = sample.rsplit("_", 3)[0] if run.setting("data.subvolume") else sample
    said = (error for error in refused if re.search(rf"/{re.escape(whole)}[.:]", str(error)))
    return next(said, DataError(f"{run.setting('data.path')} does not hold {sample} now"))


MOST_NAMES = 1 << 20  # the names of all samples with masks take at most so much [B]


def _read_mask(
    file: Any, samples: Sequence[str], place: int, shape: tuple[int, ...]
) -> NDArray[np.uint8]:
    """Unpacks a mask, of one array of all or its own, whose header has the voxels of its scan.

    Raises:
        DataError: it has others.
        Exception: whatever damaged bytes raise.
    """
    together = "masks" in file  # unless shapes differ
    key = "masks" if together else f"mask_{place}"
    wanted = (len(samples), *shape) if together else shape
    with file.zip.open(f"{key}.npy") as member:
        if np.lib.format.read_magic(member) != (1, 0):
            raise ValueError(f"{key} is not an array of numbers")
        found, _, dtype = np.lib.format.read_array_header_1_0(member)
    if found != wanted or dtype != np.uint8:
        raise DataError(f"{samples[place]}: {shape} voxels, a mask {found} of {dtype}")
    values: NDArray[np.uint8] = file[key]
    return values[place] if together else values


def _read_scan(source: Source, file: Any, samples: Sequence[str], place: int) -> Scan:
    sample = samples[place]
    index = list(source.names).index(sample)
    predicted = _read_mask(file, samples, place, source.shape_of(index)[1:])
    true = source.labels(index, Box.whole(source.shape_of(index)[1:]))
    # Through the centre of what is not background, or of the whole without any.
    places = np.argwhere(true > 0)
    centre = places.mean(0).round() if len(places) else np.array(true.shape) // 2
    at = {axis: int(place) for axis, place in zip(SPATIAL_AXES, centre, strict=True)}
    planes = _planes_through(source, index, at)
    both: tuple[PlaneValues, ...] = (true, predicted)
    crossing = [
        {axis: classes.take(at[axis], dim) for dim, axis in enumerate(SPATIAL_AXES)}
        for classes in both
    ]
    quantity = "HU" if source.classes == LIVER else "intensity"
    return Scan(sample, planes.shape, at, planes.values, planes.voxels, quantity, *crossing)


# On the picture itself, so the same on a light and on a dark page; of the classes none is a grey.
CUT_COLOUR = "#7fd4ff"
CLASS_COLOURS = ("#ff9d00", "#ff4fa3", "#00d6a1", "#ffe600", "#9f8bff", "#ff6b4a")
LETTER_COLOUR = "#ffffff"
# Not quite black, so that it stays as it is on a dark page.
LETTER_OUTLINE = (effects.withStroke(linewidth=3, foreground="#010101"),)

MASK_ALPHA = 0.4  # of the predicted mask, so that the scan below stays visible
LONGER_SIDE = 190  # the longer side of a plane [px]
THINNEST = 8  # a plane that is thinner than its length over this is drawn thicker

LEFT = 64
BELOW = 48
BESIDE = 88  # for the colour bar
ABOVE = 8
BETWEEN_TICKS = 45  # at least
ENLARGED_VOXELS = 12  # the voxels either side of a cut in the enlarged picture

ValueRange = tuple[float, float]


def volumes(run: Run) -> Chapter:
    """Shows scans with their masks, or the planes of one universe with the grid's cuts."""
    if run.segments:
        return Chapter("masks", "Scans, true and predicted", list(_scan_blocks(run)))
    return Chapter("universe", "A universe, and how it is cut", list(_universe_blocks(run)))


class PlaneCanvas(Canvas):
    """Draws the plane ``across`` an axis in the true shape of its voxels, and a colour bar.

    A scan is grey, and has its first row at the bottom. The margins are fixed: an automatic layout
    does not see the colour bar, which is as high as the plane and no higher.
    """

    def __init__(self, name: str, planes: Planes, across: str, limits: ValueRange) -> None:
        # Of a scan up is up: its indices grow towards head, front and right.
        upwards = isinstance(planes, Scan)
        colours = "gray" if upwards else "magma"
        values = planes.values[across]
        voxels = planes.voxels
        rows, columns = self.sides = [axis for axis in SPATIAL_AXES if axis != across]
        self.high = voxels.sizes[rows]
        self.wide = voxels.sizes[columns]
        bottom = values.shape[0] * self.high
        right = values.shape[1] * self.wide
        wide = max(LONGER_SIDE * min(1.0, right / bottom), LONGER_SIDE / THINNEST)
        high = max(LONGER_SIDE * min(1.0, bottom / right), LONGER_SIDE / THINNEST)
        width = LEFT + wide + BESIDE
        height = BELOW + high + ABOVE
        super().__init__(name, width=round(width), height=round(height))
        self.figure.set_layout_engine("none")
        self.axes.set_position((LEFT / width, BELOW / height, wide / width, high / height))
        self.origin = "lower" if upwards else "upper"
        self.extent = (0.0, right, 0.0, bottom) if upwards else (0.0, right, bottom, 0.0)
        self.axes.set(xlabel=voxels.title(columns), ylabel=voxels.title(rows))
        self.axes.grid(visible=False)
        for axis, pixels in ((self.axes.xaxis, wide), (self.axes.yaxis, high)):
            axis.set_major_locator(ticker.MaxNLocator(max(int(pixels / BETWEEN_TICKS), 1)))
        image = self.image(values, cmap=colours, vmin=limits[0], vmax=limits[1])
        with mpl.rc_context(FIGURE_STYLE):
            beside = self.axes.inset_axes((1.05, 0, 0.05, 1))
            bar = self.figure.colorbar(image, cax=beside, label=planes.quantity)
        bar.locator = ticker.MaxNLocator(5)
        bar.outline.set_visible(False)
        beside.grid(visible=False)
        if voxels.ends:
            first, last = voxels.ends[rows]
            self._letters((first, last) if upwards else (last, first), voxels.ends[columns])
        self.where = f"Plane {planes.at[across] + 1} of {_extent(planes, across)}"
        if voxels.unit:
            centre = (planes.at[across] + 0.5) * voxels.sizes[across]
            self.where += f", at {centre:.4g} {voxels.unit}"

    def image(self, values: NDArray[Any], **options: Any) -> Any:
        """Draws a layer of values, or of (rows, columns, RGBA), on the plane."""
        options |= {"origin": self.origin, "extent": self.extent, "interpolation": "none"}
        return self.axes.imshow(values, aspect="auto", **options)

    def outline(self, chosen: NDArray[np.bool_], colour: str) -> None:
        """Draws a line around the voxels that are chosen."""
        if min(chosen.shape) < 2:
            return
        rows, columns = (np.arange(extent) + 0.5 for extent in chosen.shape)
        grid = (columns * self.wide, rows * self.high)
        self.axes.contour(*grid, chosen, [0.5], colors=[colour], linewidths=1.5)

    def cuts(
        self, cuts: Mapping[str, Cut], window: Window | None = None, alpha: float = 0.0
    ) -> None:
        """Draws the bounds of the ``cuts`` that cross the plane, and the halos of ``window``."""
        rows, columns = self.sides
        for axis, line, band, size in (
            (rows, self.axes.axhline, self.axes.axhspan, self.high),
            (columns, self.axes.axvline, self.axes.axvspan, self.wide),
        ):
            if axis not in cuts:
                continue
            for bound in cuts[axis].bounds[1:-1]:
                line(bound * size, color=CUT_COLOUR, linewidth=1.6, path_effects=LETTER_OUTLINE)
            for lo, hi in halo_intervals(cuts[axis], window) if window is not None else ():
                band(lo * size, hi * size, color=CUT_COLOUR, alpha=alpha, linewidth=0)

    def _letters(self, rows: tuple[str, str], columns: tuple[str, str]) -> None:
        """Letters the patient's sides at the picture's edges, as viewers of scans do."""
        sides = ((0.5, 0.06, rows[0]), (0.5, 0.94, rows[1]))
        for x, y, letter in (*sides, (0.05, 0.5, columns[0]), (0.95, 0.5, columns[1])):
            self.axes.text(
                x, y, letter, transform=self.axes.transAxes, ha="center", va="center",
                color=LETTER_COLOUR, fontweight="bold", path_effects=LETTER_OUTLINE,
            )  # fmt: skip


def limits_of(planes: Sequence[NDArray[Any]], shares: tuple[float, float]) -> ValueRange:
    """Computes one range of values for all planes: the percentiles ``shares`` of finite ones."""
    every = np.concatenate([plane.ravel() for plane in planes])
    every = every[np.isfinite(every)]
    if not len(every):
        return 0.0, 1.0
    low, high = np.percentile(every, shares)
    return float(low), float(max(high, low + 1e-6))


def _extent(planes: Planes, axis: str) -> int:
    return planes.shape[SPATIAL_AXES.index(axis)]


def _cuts_of(shape: Sequence[int], run: Run) -> dict[str, Cut]:
    """Cuts a volume along each axis, into no more parts than voxels; one where it is not cut."""
    return {
        axis: Cut.balanced(axis, extent, min(extent, run.grid.get(axis, 1)))
        for axis, extent in zip(SPATIAL_AXES, shape, strict=True)
    }


def halo_intervals(cut: Cut, window: Window) -> list[tuple[int, int]]:
    """Lists the intervals along ``cut`` that some shard reads and does not own.

    >>> halo_intervals(Cut.balanced("depth", 8, 2), Window(3, before=1, after=1))
    [(4, 5), (3, 4)]
    """
    found = []
    outputs = window.cut_outputs(cut, window.outputs(cut.extent))
    for (lo, hi), out in zip(cut.intervals, outputs.intervals, strict=True):
        reads = window.reads(out)
        found += [(max(reads[0], 0), lo), (hi, min(reads[1], cut.extent))]
    return [(lo, hi) for lo, hi in found if lo < hi]


def _halo_words(cuts: Mapping[str, Cut], window: Window) -> str:
    """Says how wide the halo is; empty where nothing is cut."""
    wide = [hi - lo for cut in cuts.values() for lo, hi in halo_intervals(cut, window)]
    if not wide:
        return ""
    return f"{max(wide)} voxel{'s' if max(wide) > 1 else ''}"


def _universe_blocks(run: Run) -> Iterator[Block]:
    try:
        planes = middle_planes(run)
    except HyperslabError as error:
        yield Notice(f"No universe of this run can be shown: {error}")
        return
    window = _first_window(run, planes.shape)
    cuts = _cuts_of(planes.shape, run)
    text = (
        f"{planes.sample}, {planes.quantity} of the first channel. Every sample of "
        f"{times(planes.shape)} voxels "
    )
    first = next((cut for cut in cuts.values() if cut.parts > 1), None)
    if first is None:
        text += "is held whole by one rank."
    else:
        boxes = times(cut.parts for cut in cuts.values())
        text += f"is cut into {boxes} boxes ({times(cuts)}); each rank reads, keeps and computes "
        text += "its own."
    if window is not None and (halo := _halo_words(cuts, window)):
        text += f" For the first convolution neighbours exchange a halo of {halo} (shaded)."
    yield text
    limits = limits_of(list(planes.values.values()), (1, 99.8))
    pictures = [_universe_plane(planes, across, cuts, window, limits) for across in SPATIAL_AXES]
    if first is not None and window is not None:
        pictures.append(_enlarged(planes, first, window, limits))
    yield Figures(pictures, "medium")


def _first_window(run: Run, shape: Sequence[int]) -> Window | None:
    """Returns the first convolution's window; None for a network that is not one of ours."""
    try:
        first = variant_of(str(run.setting("model.variant")), shape[0]).convolutions[0]
    except ValueError:
        return None
    return Window(first.kernel, stride=first.stride, before=first.padding, after=first.padding)


def _universe_plane(
    planes: Planes, across: str, cuts: Mapping[str, Cut], window: Window | None, limits: ValueRange
) -> Picture:
    """Draws a middle plane with the cuts that cross it."""
    name = f"slice-{across}"
    canvas = PlaneCanvas(name, planes, across, limits)
    canvas.cuts(cuts, window, alpha=0.35)
    crossing = [f"{cuts[a].parts} along {a}" for a in canvas.sides if cuts[a].parts > 1]
    parts = int(np.prod([cuts[axis].parts for axis in canvas.sides]))
    shards = f"cut into {parts} shards: {times(crossing)}" if crossing else "not cut here"
    return canvas.picture(
        title=f"Across {across}",
        alt=f"Middle plane of a volume across {across}, {shards}.",
        caption=f"{canvas.where}, {shards}.",
    )


def _enlarged(planes: Planes, cut: Cut, window: Window, limits: ValueRange) -> Picture:
    """Draws the voxels around the first bound of ``cut``, halo and all."""
    across = "height" if cut.axis == "depth" else "depth"
    canvas = PlaneCanvas("slice-zoom", planes, across, limits)
    canvas.cuts({cut.axis: cut}, window, alpha=0.45)
    reach = min(ENLARGED_VOXELS, min(planes.shape) / 2)
    y, x = (
        cut.bounds[1] if axis == cut.axis else _extent(planes, axis) / 2 for axis in canvas.sides
    )
    canvas.axes.set_xlim((x - reach) * canvas.wide, (x + reach) * canvas.wide)
    canvas.axes.set_ylim((y + reach) * canvas.high, (y - reach) * canvas.high)
    wide = _halo_words({cut.axis: cut}, window)
    return canvas.picture(
        title="A cut, enlarged",
        alt=f"The voxels around a cut along {cut.axis}; a halo of {wide} lies on each side.",
        caption=f"Shaded: the halo of the first convolution, {wide}, "
        f"which each of the two neighbours gets from the other.",
    )


def class_colour(index: int) -> str:
    """Gives class ``index``, 1 or more, its colour; beyond the last they begin again."""
    return CLASS_COLOURS[(index - 1) % len(CLASS_COLOURS)]


def _scan_blocks(run: Run) -> Iterator[Block]:
    try:
        found = scans(run)
    except HyperslabError as error:
        yield Notice(f"No scan of this run can be shown: {error}")
        return
    if not found:
        yield Notice(
            "The masks are those of an evaluation:", f"hyperslab evaluate {quote(str(run.path))}"
        )
        return
    unseen = ", which the network never saw" if run.split == TEST else ""
    text = (
        f"These are samples of the {run.split} split{unseen}, on its own lattice, in the planes "
        "through the centre of the foreground. Lines: the true mask. Filled: the predicted one."
    )
    if any(cut.parts > 1 for cut in _cuts_of(found[0].shape, run).values()):
        text += " Straight lines: where the grid cuts the volume."
    yield text
    classes = list(run.scores)
    yield Legend([(class_colour(i), name) for i, name in enumerate(classes) if i])
    window = sorted(map(float, run.setting("data.window") or ()))
    for place, scan in enumerate(found):
        cuts = _cuts_of(scan.shape, run)
        limits = (window[0], window[1]) if window else limits_of([*scan.values.values()], (1, 99))
        yield Heading(scan.sample)
        names = {across: f"mask-{place}-{across}" for across in SPATIAL_AXES}
        pictures = [_mask_plane(scan, a, names[a], classes, limits, cuts) for a in SPATIAL_AXES]
        yield Figures(pictures, "medium")


def _mask_plane(
    scan: Scan,
    across: str,
    name: str,
    classes: Sequence[str],
    window: ValueRange,
    cuts: Mapping[str, Cut],
) -> Picture:
    """Draws a plane of a scan with its true and its predicted mask."""
    canvas = PlaneCanvas(name, scan, across, window)
    true = scan.true[across]
    predicted = scan.predicted[across]
    canvas.image(_tinted(predicted))
    for index in range(1, len(classes)):
        if (true == index).any():
            canvas.outline(true == index, class_colour(index))
    canvas.cuts(cuts)
    scores = [
        f"{name} {number(dice)}"
        for index, name in enumerate(classes)
        if index and (dice := _plane_dice(true == index, predicted == index)) is not None
    ]
    found = f"Dice here: {', '.join(scores)}." if scores else "Nothing but background here."
    return canvas.picture(
        title=f"Across {across}",
        alt=f"Plane of {scan.sample} across {across} with the true and the predicted mask. {found}",
        caption=f"{canvas.where}. {found}",
    )


def _tinted(classes: PlaneValues) -> PlaneValues:
    """Paints each class in its colour (rows, columns, RGBA), the background transparent."""
    picture = np.zeros((*classes.shape, 4), np.float32)
    for index in np.unique(classes[classes > 0]):
        picture[classes == index] = to_rgba(class_colour(int(index)), MASK_ALPHA)
    return picture


def _plane_dice(true: PlaneValues, predicted: PlaneValues) -> float | None:
    """Computes Dice in this plane; None where the class neither is nor is predicted."""
    union = int(true.sum()) + int(predicted.sum())
    return 2 * int((true & predicted).sum()) / union if union else None
