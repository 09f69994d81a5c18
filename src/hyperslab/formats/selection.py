"""Some of the redshifts and some of the parameters of a source, as a source."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np

from hyperslab.comm import Grid
from hyperslab.errors import DataError
from hyperslab.formats.extras import Extras
from hyperslab.formats.source import Array, Source, SourceView
from hyperslab.geometry import Box

SAME_NAMES = (("n_s", "N_spec"),)
"""Two names of one parameter: ours, and that of the public files."""

CLOSE = 1e-6
"""Redshifts this far apart are the same: files round them."""


class Selected(SourceView):
    """The samples of ``source`` with the channels of these redshifts, and these targets alone.

    ``None`` keeps all of them. Channels and targets come in the order asked for. Of a box the
    channels from the first to the last asked for are read, those between them too.

    Raises:
        DataError: a redshift or a parameter is not there, or twice; no file says which redshifts
            the channels are; or targets are asked for where voxels have classes.
    """

    def __init__(
        self,
        source: Source,
        *,
        redshifts: Sequence[float] | None = None,
        targets: Sequence[str] | None = None,
    ) -> None:
        self.source = source
        self.take_after(source)
        self.channels = tuple(range(source.shape[0]))
        self.chosen = tuple(range(len(source.parameters.names)))
        if redshifts is not None:
            self.channels = channels_of(source, source.redshifts, redshifts)
            self.redshifts = tuple(source.redshifts[channel] for channel in self.channels)
            self.stored_redshifts = source.redshifts
        if targets is not None:
            self.chosen = _targets_of(source, targets)
        self.shape = (len(self.channels), *source.shape[1:])
        self.shapes = tuple((len(self.channels), *shape[1:]) for shape in source.shapes)
        if source.channel_names:
            self.channel_names = tuple(source.channel_names[c] for c in self.channels)
        self.splits = source.splits
        self.parameters = source.parameters.only(self.chosen)
        self.names = source.names
        self.order = source.order

    def origin(self, sample: int) -> tuple[Source, int]:
        return self.source, sample

    def read(self, sample: int, box: Box) -> Array:
        wanted = self.channels[box.lo[0] : box.hi[0]]
        lo = min(wanted)
        hi = max(wanted) + 1
        whole = self.source.read(sample, Box((lo, *box.lo[1:]), (hi, *box.hi[1:])))
        if wanted == tuple(range(lo, hi)):
            return whole
        return whole[[channel - lo for channel in wanted]]

    def target(self, sample: int) -> Array:
        return np.asarray(self.source.target(sample))[list(self.chosen)]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return (len(self.channels), *self.source.whole_shape[1:])

    def extras(self, sample: int) -> Extras:
        """Those of the source, arrays too as far as chosen, but for the attributes."""
        whole = self.source.extras(sample)
        if self.classes:
            return whole
        parts = {"physPar": self.chosen, "redshifts": self.channels}
        arrays = {
            key: np.asarray(whole.arrays[key])[list(part)]
            for key, part in parts.items()
            if key in whole.arrays
        }
        return Extras(whole.keys, self.parameters.names, self.target(sample), arrays)

    def read_together(self, driver: str, grid: Grid) -> Source:
        raise AssertionError("a selection is made of a source that reads together")

    def close(self) -> None:
        self.source.close()


def selected(
    source: Source, redshifts: Sequence[float] | None, targets: Sequence[str] | None
) -> Source:
    """The source itself where all of it is wanted, else a `Selected` of it; raises as that does."""
    if redshifts is None and targets is None:
        return source
    return Selected(source, redshifts=redshifts, targets=targets)


def channels_of(source: Source, known: Sequence[float], wanted: Sequence[float]) -> tuple[int, ...]:
    """The channel of each wanted redshift, where those of the channels are ``known``.

    Raises:
        DataError: see `Selected`.
    """
    if not known:
        raise DataError(
            f"{source.where(0)}: does not say, as all files of the data set, which redshifts its "
            f"{source.shape[0]} channels are\n    leave data.redshifts out to read all of them"
        )
    found = []
    for redshift in wanted:
        near = [c for c, other in enumerate(known) if abs(other - redshift) <= CLOSE]
        if not near or near[0] in found:
            words = "asked for twice" if near else "not there"
            raise DataError(
                f"redshift {redshift:g} is {words}: {source.where(0)} has the redshifts "
                f"{', '.join(f'{other:g}' for other in known)}"
            )
        found.append(near[0])
    if not found:
        raise DataError("no redshift is asked for: give one at least, or leave it out for all")
    return tuple(found)


def _targets_of(source: Source, wanted: Sequence[str]) -> tuple[int, ...]:
    if source.classes:
        raise DataError(
            f"{source.where(0)}: has a class for every voxel and no parameters to choose from"
        )
    names = source.parameters.names
    found = []
    for name in wanted:
        other = next((pair[1 - pair.index(name)] for pair in SAME_NAMES if name in pair), name)
        index = next((i for i, n in enumerate(names) if n in (name, other)), None)
        if index is None or index in found:
            words = "asked for twice" if index is not None else "not there"
            raise DataError(
                f"parameter {name!r} is {words}{_nearest(name, names)}; {source.where(0)} has "
                f"{', '.join(names)}"
            )
        found.append(index)
    if not found:
        raise DataError("no parameter is asked for: give one at least, or leave it out for all")
    return tuple(found)


def _nearest(name: str, names: Sequence[str]) -> str:
    lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return f", perhaps {lower[close[0]]!r}" if close and lower[close[0]] != name else ""
