"""From a recipe to a trained network: the loop, its history, its checkpoints, its ranks.

The way of a run: `recipe` reads what to do (`config` says what may be said), `launch` starts the
ranks, `run` builds everything (with `setup` and `optim`), `trainer` steps through the data, `agree`
lets the ranks agree on each step, `reporter` writes the history, `checkpoints` keeps the way back.
"""

from hyperslab.checkpoint.save_load import CheckpointError, load, save

__all__ = ["CheckpointError", "load", "save"]
