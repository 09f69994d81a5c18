"""Declares the options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from hyperslab.errors import DataError
from hyperslab.formats.storage_order import Channels
from hyperslab.train.sliding_windows import WindowPolicy

RunArgument = Annotated[Path, typer.Argument(help="The folder of a training run.")]
RanksOption = Annotated[
    int | None,
    typer.Option(min=1, help="How many to start. Default: as many as the grid, or 1."),
]
CheckpointOption = Annotated[
    str, typer.Option(help="best, latest, the name of one of the run's, or a path.")
]


WindowOption = Annotated[
    str | None, typer.Option(help="Predict in windows of so many voxels, D,H,W: 96,96,96.")
]
OverlapOption = Annotated[
    float | None, typer.Option(help="Of neighbouring windows, a share. Default: 0.5.")
]
BlendOption = Annotated[
    str | None, typer.Option(help="Where windows overlap: gaussian (the default) or constant.")
]


def options_of_windows(windows: WindowPolicy | None) -> list[str]:
    """Write windows as a command line says them."""
    if windows is None:
        return []
    size = ",".join(map(str, windows.size))
    return ["--window", size, "--overlap", str(windows.overlap), "--blend", windows.blend]


def windows_of_options(
    window: str | None, overlap: float | None, blend: str | None
) -> WindowPolicy | None:
    """Read the options of windows; None where they say nothing.

    Raises:
        BadParameter: they are no window, or there is none for an overlap.
    """
    if window is None:
        if overlap is not None or blend is not None:
            raise typer.BadParameter("--overlap and --blend are of windows: give --window D,H,W")
        return None
    try:
        numbers = [int(number) for number in window.split(",")]
        depth, height, width = numbers * 3 if len(numbers) == 1 else numbers
        chosen = 0.5 if overlap is None else overlap
        return WindowPolicy((depth, height, width), chosen, blend or "gaussian")  # type: ignore[arg-type]
    except DataError as error:
        raise typer.BadParameter(str(error)) from None
    except ValueError:
        raise typer.BadParameter(f"--window {window}: give one number or three, D,H,W") from None


MissingChunksOption = Annotated[
    bool,
    typer.Option(
        "--missing-chunks",
        help="What HDF5 files and Zarr groups do not store is their fill value.",
    ),
]
TrustOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="An installed module whose classes the recipe in a run's folder may name, such as "
        "monai.networks.nets; may be repeated. What a recipe of your own has trained here needs "
        "none; a run that went on by --trust needs it again.",
    ),
]
PluginOption = Annotated[
    list[str] | None, typer.Option(help="A module to import, which registers formats.")
]


def channels_of_option(word: str | None) -> Channels | None:
    """Read ``--channels``; None where it says nothing.

    Raises:
        BadParameter: it is no such place.
    """
    place: Channels
    for place in get_args(Channels):
        if word == place:
            return place
    if word is not None:
        raise typer.BadParameter(f"--channels {word}: give {' or '.join(get_args(Channels))}")
    return None
