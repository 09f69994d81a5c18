"""Runs `hyperslab simulate`: makes a folder of N-body universes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hyperslab.cli.options import PartOption, part_of_command
from hyperslab.cli.terminal import counting
from hyperslab.simulate.parameters import NAMES, RANGES, settings_of


def simulate_command(
    out: Annotated[Path, typer.Argument(help="Folder of the universes; created if missing.")],
    count: Annotated[
        int, typer.Option(min=1, help="Universes in the folder, including existing ones.")
    ],
    size: Annotated[int, typer.Option(help="Voxels per side.")],
    box_size: Annotated[
        float | None,
        typer.Option(
            help="Side of a universe [Mpc/h] at H_0 = 70; it grows with H_0. Default: 2 per voxel."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed; universe i depends only on the seed and i.")] = 0,
    parameters: Annotated[
        str,
        typer.Option(help="Parameters that vary, separated by commas; the others stay fiducial."),
    ] = ",".join(NAMES),
    ranges: Annotated[
        str,
        typer.Option(
            help=f"Ranges: {', '.join(RANGES)} (Mathuriya et al. 2018), and NAME=lo..hi, "
            "separated by commas."
        ),
    ] = "wide",
    particles: Annotated[
        int | None, typer.Option(help="Particles per side. Default: as many as voxels.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Time steps of the particle mesh.")] = 10,
    part: PartOption = None,
) -> None:
    """Simulate N-body universes in the public HDF5 layout.

    Repeat the command to continue after an interruption; finished universes are kept. Under srun,
    jsrun and torchrun each task makes its part of them.
    """
    number, parts = part_of_command(part)
    settings: dict[str, Any] = {
        "count": count,
        "size": size,
        "box_size": box_size,
        "seed": seed,
        "parameters": [name.strip() for name in parameters.split(",") if name.strip()],
        "particles": particles,
        "steps": steps,
        "ranges": ranges,
    }
    settings_of(**settings)
    from hyperslab.simulate.universes import make_universes

    mine = len(range(number, count, parts))
    with counting("universes", mine) as done:
        make_universes(out, **settings, part=(number, parts), done=done)
    typer.echo(f"{mine} universes in {out}" + (f", part {number} of {parts}" * (parts > 1)))
