"""Says which samples of a recipe's data are used, and in which windows, and looks at them early.

All of this needs no torch, so that a command which cannot run says so before that is imported. In
reading order: the samples of a split; windows; the look at the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from hyperslab.data.sampler import Folds, Listed, SplitPolicy, Splits, check_one_shape
from hyperslab.errors import DataError, LayoutError, RecipeError
from hyperslab.formats.source import Source
from hyperslab.recipe.schema import Recipe


def samples_of_split(recipe: Recipe, source: Source, split: str) -> list[int]:
    """Return the samples of a split of the recipe's data; raises as `SplitPolicy.samples`."""
    data = recipe.data
    policy = SplitPolicy(
        split,
        splits_of_recipe(recipe),
        data.fractions,
        data.counts,
        folders=data.splits == "folders",
        seed=data.seed,
    )
    return policy.samples(source)


def splits_of_recipe(recipe: Recipe) -> Splits | None:
    """Return a recipe's lists or folds, None where splits are drawn; raises as `Lists.folders`."""
    data = recipe.data
    words = {split: data.lists.relative(split) for split in data.listed}
    if data.fold is not None and data.folds is not None:
        return Folds(data.fold, data.folds, **words)
    return Listed(**words) if words else None


def training_digest(recipe: Recipe, source: Source) -> str:
    """Hash the names of the training split, repeated ones again, and their seed (SHA-256).

    Of the targets too, where they are not in the volumes' files: a table may change alone.
    """
    samples = samples_of_split(recipe, source, "train")
    names = [source.names[sample] for sample in samples]
    names *= recipe.data.repeat
    words = [recipe.data.seed, names]
    if source.targets_apart:
        words.append([np.asarray(source.target(sample)).tolist() for sample in samples])
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def check_calibrated(split: str) -> None:
    """Refuse to measure a calibration by samples to which it is fitted (`DataError`)."""
    if split in ("validation", "all"):
        raise DataError(
            f"calibration fits lines to the validation split, so the {split} split says nothing "
            "about them\n    measure the test split"
        )


Blend = Literal["constant", "gaussian"]


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """``size``: voxels of a window along D, H and W. ``overlap``: of neighbours, a share of that.

    ``blend``: where windows overlap all count alike, or those whose centre is nearer count more.

    Raises:
        DataError: a size is less than 1, the overlap not in [0, 1), or there is no such blend.
    """

    size: tuple[int, int, int]
    overlap: float = 0.5
    blend: Blend = "gaussian"

    def __post_init__(self) -> None:
        if min(self.size) < 1 or not 0 <= self.overlap < 1 or self.blend not in get_args(Blend):
            raise DataError(
                f"window {self.size}, overlap {self.overlap:g}, blend {self.blend!r}: needs 1 "
                f"voxel at least, 0 <= overlap < 1, and {' or '.join(get_args(Blend))}"
            )

    @property
    def facts(self) -> dict[str, object]:
        """Return the facts by which a prediction is known again, as JSON has them."""
        return {"window": list(self.size), "overlap": self.overlap, "blend": self.blend}


def check_windows(windows: WindowPolicy | None, classes: Sequence[str]) -> None:
    """Refuse windows where voxels have no classes (`DataError`)."""
    if windows is not None and not classes:
        raise DataError("windows are for networks that give voxels classes; this one gives numbers")


def check_data(
    recipe: Recipe, *splits: str, windows: WindowPolicy | None = None, cut: bool = True
) -> Source | None:
    """Refuse data that the recipe cannot be run on, as far as headers tell, before ranks start.

    This process alone looks, and only at formats of ours: code of others, and files that are left
    out if they cannot be read, are for the ranks. Without ``cut`` no volume has to be cut by the
    recipe's grid. Returns the data, if it has looked.

    Raises:
        DataError: files are not what the recipe says, a split has no sample, or the volumes of a
            mini-batch would differ in shape; or as `check_windows`.
        LayoutError: volumes cannot be cut, into sub-volumes or for the grid.
        RecipeError: the network, or the loss, is for other volumes.
    """
    data = recipe.data
    if data.target is not None or data.plugins or data.on_error == "skip":
        return None
    source = data.chosen_volumes()
    if recipe.segments not in (None, bool(source.classes)):
        raise RecipeError(mismatch_message(recipe, source.classes))
    check_windows(windows, source.classes)
    recipe.model.check_extents(source.shape[1:], data.where)
    if cut:
        check_one_shape(source, data.batch_size)
        shapes = source.shapes or (source.shape,)
        for shape in dict.fromkeys(shapes):
            try:
                recipe.check_cuts(shape[1:])
            except LayoutError as error:
                raise LayoutError(f"{source.where(shapes.index(shape))}: {error}") from None
    for split in splits:
        samples_of_split(recipe, source, split)
    return source


def mismatch_message(recipe: Recipe, classes: Sequence[str]) -> str:
    """Return the words for data that network or loss are not made for."""
    found = "a class for every voxel" if classes else "parameters and no classes"
    remedy = (
        "model.name=unet3d and loss=dice_cross_entropy"
        if classes
        else "model.name=cosmoflow and loss=mse"
    )
    loss = recipe.loss if isinstance(recipe.loss, str) else recipe.loss.target
    taken = f"model.name={recipe.model.name} and loss={loss} are"
    if recipe.model.segments is None:
        taken = f"loss={loss} is"
    if recipe.data.synthetic is not None:
        remedy += f", or data.synthetic.{'targets=4' if classes else 'classes=3'}"
    return (
        f"{recipe.data.where} holds volumes with {found}, but "
        f"{taken} not for these\n    use {remedy}"
    )
