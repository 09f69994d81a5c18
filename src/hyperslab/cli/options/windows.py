"""The options of sliding windows, which `hyperslab predict` and `hyperslab evaluate` share."""

from __future__ import annotations

from typing import Annotated

import typer

from hyperslab.errors import DataError
from hyperslab.evaluate.sliding_windows import WindowPolicy

WindowOption = Annotated[
    str | None, typer.Option(help="Predict in windows of so many voxels, D,H,W: 96,96,96.")
]
OverlapOption = Annotated[
    float | None, typer.Option(help="Of neighbouring windows, a share. Default: 0.5.")
]
BlendOption = Annotated[
    str | None, typer.Option(help="Where windows overlap: gaussian (the default) or constant.")
]


def as_options(windows: WindowPolicy | None) -> list[str]:
    """As a command line says them."""
    if windows is None:
        return []
    size = ",".join(map(str, windows.size))
    return ["--window", size, "--overlap", str(windows.overlap), "--blend", windows.blend]


def windows_of_options(
    window: str | None, overlap: float | None, blend: str | None
) -> WindowPolicy | None:
    """What they say; None where they say nothing.

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
