"""What every rank does by itself, and what fails for all of them if it fails for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from hyperslab.comm import Grid
from hyperslab.errors import CommError, DataError

T = TypeVar("T")


def together(grid: Grid, make: Callable[[], T]) -> T:
    """What ``make`` returns, once all ranks have it; all ranks call this.

    A rank that just went on would wait for one that has given up.

    Raises:
        DataError: ``make`` has raised one, here or on another rank, which is named.
        CommError: another rank died meanwhile.
    """
    if grid.size == 1:
        return make()
    failed: DataError | None = None
    try:
        result = make()
    except DataError as error:
        failed = error
    words: list[str | None] = [None] * grid.size
    try:
        dist.all_gather_object(words, None if failed is None else str(failed))
    except RuntimeError as error:
        raise CommError(
            f"rank {grid.rank} lost contact with another rank while a data set was opened: "
            f"{str(error).splitlines()[0]}"
        ) from error
    if failed is not None:
        raise failed
    for rank, said in enumerate(words):
        if said is not None:
            raise DataError(f"rank {rank} says: {said}")
    return result
