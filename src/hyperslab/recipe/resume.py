"""Which keys of a recipe a resumed run may change: by key, and those that are not named may not."""

from __future__ import annotations

from typing import Any

from hyperslab.errors import RecipeError
from hyperslab.recipe.compare import differences, launch_facts
from hyperslab.recipe.schema import Recipe

TAKES_EFFECT = (
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.clip",
    "optimizer.larc",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.momentum",
    "optimizer.weight_decay",
    "data.augment",
    "precision",
)
"""The steps after the checkpoint are done with the new value."""

SAME_RESULT = (
    "grid",
    "output",
    "epochs",
    "stop_at",
    "mlperf",
    "kernels",
    "memory",
    "device",
    "checkpoint",
    "loggers",
    "follow_test",
    "metrics",
    "parallelize.until",
    "parallelize.ordinary_inputs",
    "parallelize.random_states",
    "timeout",
    "peak",
    "data.path",
    "data.files",
    "data.keys",
    "data.table",
    "data.plugins",
    "data.format",
    "data.channels",
    "data.driver",
    "data.mode",
    "data.budget",
    "data.staging",
    "data.on_error",
    "data.outside_files",
    "data.missing_chunks",
    "data.prefetch",
    "data.prefetch_bytes",
)
"""How, where and how long: the steps are the same, up to rounding."""

COMPARED = (
    "data.batch_size",
    "data.seed",
    "data.fractions",
    "data.counts",
    "data.splits",
    "data.train",
    "data.validation",
    "data.test",
    "data.fold",
    "data.folds",
    "data.repeat",
    "data.subvolume",
    "data.targets",
    "data.columns",
    "data.ranges",
    "data.redshifts",
)
"""The checkpoint says itself what they came to; see `RunState.restore`."""


def changed_keys(before: Recipe, now: Recipe) -> dict[str, list[Any]]:
    """The keys that a resumed run changes, with the value before and the value now.

    Raises:
        RecipeError: it must not change one of them; names it, with both values.
    """
    old, new = launch_facts(before), launch_facts(now)
    found = {key: [_at(old, key), _at(new, key)] for key in differences(old, new)}
    for key, (then, value) in found.items():
        if not _is_in(key, TAKES_EFFECT + SAME_RESULT + COMPARED):
            raise RecipeError(
                f"--resume: {key} is {value} but the run in output {now.output} has {then}\n"
                "    put it back, or start another run; a resumed run may change "
                f"{', '.join(TAKES_EFFECT)}, and what leaves its steps as they are "
                "(docs/reliability.md)"
            )
    return found


def _is_in(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
