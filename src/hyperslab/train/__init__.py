"""From a recipe to a trained network: the loop, in reading order.

`run` builds everything (with `build`, `objective`, `optimizers` and `precision`), `trainer` steps
through the data, `progress` keeps the position, the `history` and the checkpoints: the ranks vote
on each `step` (`step_vote`), end at a `stop_request`, and the `reporter` shows how far they are.
"""

from hyperslab.checkpoint.save_load import load, save
from hyperslab.errors import CheckpointError

__all__ = ["CheckpointError", "load", "save"]
