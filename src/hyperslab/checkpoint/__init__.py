"""Checkpoints: `save` and `load` on any grid, which ones a run keeps, and the state of a run."""
