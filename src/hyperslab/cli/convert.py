"""`hyperslab convert`: what others publish, as HDF5 of which each rank reads its box."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from hyperslab.cli.progress import progress
from hyperslab.ct import Outcome, Pair, Shape, find, make_phantoms
from hyperslab.ct import convert as convert_pairs

convert = typer.Typer(
    help="Convert published data to HDF5 of which each rank reads its box.",
    no_args_is_help=True,
)


LITS = """Convert liver CTs: LiTS, or the liver task of the Medical Segmentation Decathlon.

Reads volume-N.nii with segmentation-N.nii, and imagesTr/liver_N.nii with labelsTr/liver_N.nii,
each also as .nii.gz, in SRC and below. Turns each volume to the axes z, y, x (upwards, forwards, to
the right), resamples it to the size, and writes OUT/volume-N.hdf5 with HU as int16 and the labels.

A volume that is damaged, not 3-D, empty, oblique, without labels or with labels that do not fit is
skipped and named on standard error. Run it again to go on after a stop: finished files are kept.
Exits with 1 if there is nothing to show for it."""


def _wrapped(text: str) -> str:
    """Paragraphs in one line each: the terminal breaks them."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


@convert.command(help=_wrapped(LITS))
def lits(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="[SRC] OUT", help="Folder of the NIfTI files; folder to fill."),
    ],
    size: Annotated[
        str, typer.Option(help="Voxels along each axis, or three numbers D,H,W (z, y, x).")
    ],
    synthetic: Annotated[
        int | None,
        typer.Option(help="Take no SRC: make so many phantoms in OUT/nifti and convert them."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Phantom N depends on this, N and the size.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes, one volume each at a time. Default: one per core, up to 4."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if a volume with labels was skipped.")
    ] = False,
) -> None:
    shape = _shape(size)
    *sources, out = folders
    if len(sources) != (synthetic is None):
        needed = "SRC and OUT" if synthetic is None else "OUT alone beside --synthetic"
        raise typer.BadParameter(f"got {len(folders)} folders; give {needed}")
    if synthetic is None:
        pairs = find(sources[0])
    else:
        pairs = _phantoms(out / "nifti", synthetic, shape, seed)
    outcomes = _converted(pairs, out, shape, workers)
    _report(outcomes, out)
    failed = [o for o in outcomes if o.state == "skipped" and not o.pair.test]
    if (strict and failed) or all(outcome.state == "skipped" for outcome in outcomes):
        raise typer.Exit(1)


def _shape(size: str) -> Shape:
    try:
        numbers = [int(number) for number in size.split(",")]
        depth, height, width = numbers * 3 if len(numbers) == 1 else numbers
    except ValueError:
        raise typer.BadParameter(f"--size {size}: give one number or three, D,H,W") from None
    return depth, height, width


def _phantoms(folder: Path, count: int, shape: Shape, seed: int) -> list[Pair]:
    with progress() as bar:
        task = bar.add_task("phantoms", total=count)
        return make_phantoms(
            folder,
            count,
            slices=shape[0],
            width=max(shape[1:]),
            seed=seed,
            done=lambda pair: bar.advance(task),
        )


def _converted(pairs: list[Pair], out: Path, shape: Shape, workers: int | None) -> list[Outcome]:
    workers = min(4, os.cpu_count() or 1) if workers is None else workers
    with progress() as bar:
        task = bar.add_task("volumes", total=len(pairs))
        return convert_pairs(
            pairs, out, shape=shape, workers=workers, done=lambda outcome: bar.advance(task)
        )


def _report(outcomes: list[Outcome], out: Path) -> None:
    for outcome in sorted((o for o in outcomes if o.reason), key=lambda o: o.pair.name):
        typer.echo(f"skipped {outcome.pair.name}: {outcome.reason}", err=True)
    count = Counter(outcome.state for outcome in outcomes)
    typer.echo(
        f"{count['converted'] + count['kept']} volumes in {out} "
        f"({count['converted']} converted, {count['kept']} kept), {count['skipped']} skipped"
    )
