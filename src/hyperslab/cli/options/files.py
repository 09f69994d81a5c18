"""How the files of a folder are taken because the user says so."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from hyperslab.formats.shared.channels import Channels

MissingChunksOption = Annotated[
    bool,
    typer.Option(
        "--missing-chunks",
        help="What HDF5 files and Zarr groups do not store is their fill value.",
    ),
]
PluginOption = Annotated[
    list[str] | None, typer.Option(help="A module to import, which registers formats.")
]


def channels_of_option(word: str | None) -> Channels | None:
    """What ``--channels`` says; None where it says nothing.

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
