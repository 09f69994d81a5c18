"""Runs `hyperslab inspect`: says what a folder or recipe holds, and what reading it costs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperslab.cli import options
from hyperslab.cli.terminal import say
from hyperslab.comm import AXES
from hyperslab.formats import registry
from hyperslab.formats.files import AccessPolicy
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.trust import trust_of

if TYPE_CHECKING:
    from hyperslab.formats.source import Source
    from hyperslab.formats.storage import Storage

RECIPES = (".yaml", ".yml")
EXTENT = re.compile(rf"grid\.({'|'.join(AXES)})=([1-9]\d*)")


def inspect_command(
    path: Annotated[Path, typer.Argument(help="A folder that hyperslab.open takes, or a recipe.")],
    places: Annotated[
        list[str] | None,
        typer.Argument(help="A grid, such as grid.depth=2; for a recipe, any override."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help=f"Format of the folder: {registry.choices(registry.names())}."),
    ] = None,
    channels: options.ChannelsOption = None,
    plugin: options.PluginOption = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything and compare every checksum.")
    ] = False,
    outside_files: options.OutsideFilesOption = False,
    missing_chunks: options.MissingChunksOption = False,
    trust: options.TrustOption = None,
) -> None:
    """Show what a folder holds and what reading it costs.

    Given a recipe, the command inspects the recipe's data.
    """
    registry.load_plugins(plugin or [])
    words = places or []
    if path.suffix in RECIPES and path.is_file():
        said: dict[str, object] = {"format": format, "channels": channels}
        said |= {"outside_files": outside_files, "missing_chunks": missing_chunks}
        words += [f"data.{key}={value}" for key, value in said.items() if value]
        recipe = load_recipe(path, words, trust=trust_of(path, trust or ()))
        recipe.data.check_path()
        source = recipe.data.chosen_volumes()
        found, extents = _format_of(recipe), recipe.grid.model_dump()
    else:
        extents = _extents(words)
        allowed = AccessPolicy(outside_files, missing_chunks)
        registry.check_source(path, format)
        from hyperslab.formats.source import ScanOptions

        found = format or registry.find_format(path)[0].name
        source = registry.sources_here([path], ScanOptions(channels, format, allowed=allowed))
    storage = source.storage(0)
    say(f"{path}: {len(source.names)} samples, {found}")
    for word, text in _about(source, storage).items():
        say(f"  {word:11}{text}")
    for line in (*_costs(source, storage, extents), *_store_costs(source, extents)):
        say(line)
    if verify:
        _verify(source, path if path.is_dir() else None)


def _verify(source: Source, folder: Path | None) -> None:
    from hyperslab.formats.writer import verify_samples

    bad = 0
    recorded = 0
    for found in verify_samples(source, folder):
        recorded += found.recorded
        if found.problem:
            bad += 1
            say(f"damaged: {found.problem}", err=True)
    count = len(source.names)
    say(
        f"read all {count} samples: {count - bad} are fine, {bad} damaged; {recorded} were also "
        "compared with the checksums of their conversion"
    )
    if bad:
        raise typer.Exit(1)


def _format_of(recipe: Recipe) -> str:
    """Name the formats of a recipe's folders, or else what makes its volumes."""
    data = recipe.data
    if data.synthetic is not None or data.target is not None:
        return data.target or "synthetic"
    if data.format is not None or data.mapping is not None:
        return data.format or registry.MAPPED
    found = [registry.find_format(folder)[0].name for folder in data.lists.folders()]
    return " and ".join(dict.fromkeys(found))


def _extents(words: list[str]) -> dict[str, int]:
    extents = {}
    for word in words:
        match = EXTENT.fullmatch(word)
        if match is None:
            raise typer.BadParameter(f"{word}: give grid.AXIS=N, AXIS one of {', '.join(AXES)}")
        extents[match[1]] = int(match[2])
    return extents


def _about(source: Source, storage: Storage | None) -> dict[str, str]:
    # With the physical values at -1 and 1 where they are known.
    parameters = [
        name if (low, high) == (-1, 1) else f"{name} ({low:.4g} to {high:.4g})"
        for name, (low, high) in source.parameters.ranges.items()
    ]
    found = {"parameters": ", ".join(parameters)}
    if source.classes:
        found = {"classes": ", ".join(source.classes)}
    if source.channel_names:
        found["channels"] = ", ".join(source.channel_names)
    if (spacing := source.voxel_size(0)) is not None:
        found["voxel"] = f"{' x '.join(f'{size:.4g}' for size in spacing)} mm (D x H x W)"
    volume = f"{_product(source.shape)} (C x D x H x W) {source.dtype.name}"
    if source.shapes:
        least = min(source.shapes, key=math.prod)
        count = len(set(source.shapes))
        volume = f"{count} shapes, {_product(least)} to {volume}; data.batch_size=1"
    return {
        "first": source.where(0),
        "volume": volume,
        "stored": "not said by its format" if storage is None else _stored(storage),
        **found,
    }


def _stored(storage: Storage) -> str:
    chunk = "" if storage.chunk is None else f", chunks of {_product(storage.chunk)}"
    packing = f", {storage.compression}" if storage.compression else ""
    return f"{_product(storage.shape)} ({storage.order}){chunk}{packing}, {_size(storage.size)}"


def _costs(source: Source, storage: Storage | None, extents: dict[str, int]) -> list[str]:
    from hyperslab.formats.storage import read_cost, replica_boxes, storage_advice

    if storage is None:
        return []
    ranks = [read_cost(storage, box) for box in replica_boxes(source.shape, extents)]
    most = max(ranks, key=lambda rank: rank.read)
    read = sum(rank.read for rank in ranks)
    grid = " ".join(f"{axis}={extents.get(axis, 1)}" for axis in AXES[1:])
    lines = [
        f"reading the volume of a sample on {grid}:",
        f"  a rank     a box of {_size(most.box)}: {_size(most.read)} in {most.requests} requests",
        f"  all        {_size(sum(rank.box for rank in ranks))}: {_size(read)} in "
        f"{sum(rank.requests for rank in ranks)} requests, {read / storage.size:.2f} x the file's",
    ]
    words = storage_advice(storage, ranks, extents)
    return [*lines, f"  advice     {words}"] if words else lines


def _store_costs(source: Source, extents: dict[str, int]) -> list[str]:
    """Say what the store takes to keep every sample, so that only the first epoch reads."""
    from hyperslab.formats.storage import replica_boxes

    grid = {axis: extents.get(axis, 1) for axis in AXES}
    ranks = math.prod(grid.values())
    voxels = max(box.size for box in replica_boxes(source.shape, extents)) // source.shape[0]
    labels = voxels if source.classes else 8 * len(source.parameters.names)
    size = voxels * source.shape[0] * source.dtype.itemsize + labels
    each = -(-len(source.names) // grid["data"])
    return [
        f"keeping all of it on {' '.join(f'{axis}={number}' for axis, number in grid.items())}:",
        f"  a rank     {each} boxes, {_size(each * size)} of memory",
        f"  {'all' if ranks == 1 else f'{ranks} ranks':11}{_size(each * size * ranks)}",
    ]


def _product(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))


def _size(count: int) -> str:
    """Write a size [B] in the unit that suits it."""
    power = min(3, int(math.log2(max(count, 1)) // 10))
    return f"{count / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
