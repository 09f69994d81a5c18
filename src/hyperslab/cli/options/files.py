"""What files may do because the user says so: `hyperslab.formats.shared.reach.Allowed`."""

from __future__ import annotations

from typing import Annotated

import typer

MissingChunksOption = Annotated[
    bool,
    typer.Option(
        "--missing-chunks",
        help="What HDF5 files and Zarr groups do not store is their fill value.",
    ),
]
