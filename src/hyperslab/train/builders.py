"""Builds the data and the network of a recipe; all commands build them alike.

First everything that a recipe names is looked up and checked, before anything is opened or made;
then the splits of its data are opened, what a checkpoint says of them is collected, and the
network is made for them and parallelised.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hyperslab import data as volumes
from hyperslab.checkpoint.run_state import DataCard
from hyperslab.comm import Grid
from hyperslab.comm.agreement import broadcast_from_main
from hyperslab.comm.placement import CUBE, Numbering, number_by_node
from hyperslab.data.open_dataset import StorePolicy
from hyperslab.data.store import memory_budget
from hyperslab.errors import RecipeError
from hyperslab.formats.registry import sources_of
from hyperslab.formats.source import Source
from hyperslab.parallel import parallelize
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.section import TargetSection
from hyperslab.train.network import NO_USER_OBJECTS, UserObjects, build_network, check_first_pass
from hyperslab.train.objective import check_loss_target
from hyperslab.train.samples import splits_of_recipe


def numbering_of(recipe: Recipe) -> Numbering:
    """Return how the ranks of a recipe's grid are placed on nodes, as far as it says the volumes.

    They count as cubes if it does not, and with ``grid: auto`` only ranks of a node come together.
    """
    data = recipe.data
    shape = data.shape if data.synthetic is None else data.synthetic.shape
    volume = CUBE if shape is None or data.subvolume is not None else shape[1:]
    extents = None if recipe.grid.auto else recipe.grid.model_dump()
    return partial(number_by_node, extents=extents, volume=volume)


def check_targets(recipe: Recipe) -> None:
    """Look at what the recipe names before anything is opened or made; raises as `Maker`."""
    recipe.model.check()
    if "optimizer" not in recipe.handed_in:
        recipe.optimizer.check()
    schedule = recipe.optimizer.schedule
    if schedule is not None and "optimizer.schedule" not in recipe.handed_in:
        schedule.check()
    metrics = {f"metrics.{name}": metric for name, metric in recipe.metrics.items()}
    for key, section in {"loss": recipe.loss, **metrics}.items():
        if isinstance(section, TargetSection) and key not in recipe.handed_in:
            check_loss_target(section, key)


def check_user_objects(recipe: Recipe, given: UserObjects) -> None:
    """Refuse to train without what a program has handed in when the run began (`RecipeError`)."""
    here = {
        "loss": given.loss,
        "optimizer": given.optimizer,
        "optimizer.schedule": given.schedule,
        **{f"metrics.{name}": metric for name, metric in given.metrics.items()},
    }
    missing = [f"{key} ({recipe.handed_in[key]})" for key in recipe.handed_in if not here.get(key)]
    if recipe.model.name == "python" and given.model is None:
        missing.insert(0, recipe.model.words)
    if missing:
        raise RecipeError(
            f"this run belongs to a program, which passed {', '.join(missing)}\n"
            f"    continue it there: hs.fit(..., output={str(recipe.output)!r}, resume=True)"
        )


KEEP_NOTHING = StorePolicy("direct")


def open_training(
    recipe: Recipe, grid: Grid, given: UserObjects = NO_USER_OBJECTS
) -> Iterator[volumes.Dataset]:
    """Open all that an epoch shows: training, which gets the store's budget first, validation, and
    test, if it is to be followed.

    Each is opened when it is asked for.
    """
    data = recipe.data
    source = _scanned_once(recipe, grid, given)
    budget: int | None = None
    disk: int | None = None if data.staging is None else data.staging_budget
    if data.mode != "direct":
        budget = memory_budget(grid) if data.budget is None else data.budget
    for split in ("train", "validation", *(["test"] if recipe.follow_test else [])):
        store = KEEP_NOTHING
        if budget is not None:
            store = StorePolicy(data.mode, budget, data.staging, disk)
        own = replace(given, source=copy.deepcopy(source)) if source is not None else given
        opened = open_data(recipe, grid, split=split, store=store, given=own)
        if budget is not None:
            budget -= opened.store_room
        if disk is not None:
            disk -= opened.staging_room
        yield opened


def _scanned_once(recipe: Recipe, grid: Grid, given: UserObjects) -> Source | None:
    """Look through the folders once for all splits; None where `hyperslab.open` has to do more.

    Each split then takes a copy, with open files of its own.
    """
    data = recipe.data
    if given.source is not None or data.on_error == "skip" or data.driver is not None:
        return None
    origin = data.origin
    if isinstance(origin, Source):
        return None
    folders = [origin] if isinstance(origin, Path) else origin
    return sources_of(folders, grid, data.scan_options)


def open_data(
    recipe: Recipe,
    grid: Grid,
    *,
    split: str,
    shuffle: bool | None = None,
    store: StorePolicy = KEEP_NOTHING,
    given: UserObjects = NO_USER_OBJECTS,
) -> volumes.Dataset:
    """Open one split of the data; only training itself is shuffled, augmented and repeated.

    Without a ``store`` nothing is kept, as for a single pass.
    """
    data = recipe.data
    trains = split == "train" and shuffle is not False
    return volumes.open(
        given.source if given.source is not None else data.origin,
        grid,
        batch_size=data.batch_size,
        split=split,
        splits=broadcast_from_main(lambda: splits_of_recipe(recipe)),
        seed=data.seed,
        shuffle=shuffle,
        format=data.format,
        channels=data.channels,
        outside_files=data.outside_files,
        missing_chunks=data.missing_chunks,
        transform=data.transform,
        window=data.window,
        augment=data.augment and trains,
        redshifts=data.redshifts,
        targets=data.targets,
        subvolume=data.subvolume,
        multiple=data.multiple,
        driver=data.driver,
        mapping=data.mapping,
        store=store,
        prefetch=volumes.PrefetchPolicy(data.prefetch, data.prefetch_bytes),
        on_error=data.on_error,
        fractions=data.fractions,
        counts=data.counts,
        folders=data.splits == "folders",
        repeat=data.repeat if trains else 1,
    )


def data_card(source: Source) -> DataCard:
    """Return the description of the data that a checkpoint keeps beside its network."""
    return DataCard(
        shape=source.shape,
        whole=source.whole_shape,
        classes=source.classes,
        parameters=source.parameters,
        redshifts=source.redshifts,
        stored_redshifts=source.stored_redshifts,
        dtype=np.dtype(source.dtype).name,
        varied=bool(source.shapes),
        voxel=_voxel_of_all(source),
        channels=source.channel_names,
    )


def _voxel_of_all(source: Source) -> tuple[float, ...]:
    """Return the voxel size [mm] that volumes of different shapes share, if they do.

    Those of one shape are told by that.
    """
    first = source.voxel_size(0) if source.shapes else None
    if first is None:
        return ()
    others = (source.voxel_size(sample) for sample in range(1, len(source.names)))
    alike = all(size is not None and np.allclose(size, first, rtol=5e-2) for size in others)
    return first if alike else ()


def build_model(
    recipe: Recipe, about: DataCard, grid: Grid, given: UserObjects = NO_USER_OBJECTS
) -> torch.nn.Module:
    """Build the recipe's network for such data and parallelise it; raises as `build_network`."""
    model = build_network(recipe, about, given)
    if given.model is not None and "no_sync" in vars(model):
        return model  # by `hyperslab.fit`, or by the program itself
    options = recipe.parallelize
    parallelize(
        model,
        grid,
        until=options.until,
        batch_norm=recipe.statistics,
        kernels=recipe.kernels,
        memory="none" if recipe.memory == "auto" else recipe.memory,
        ordinary_inputs=options.ordinary_inputs,
        random_states=options.random_states,
        gradients=options.gradients,
    )
    if recipe.model.segments is None:
        check_first_pass(model, recipe, about)
    return model
