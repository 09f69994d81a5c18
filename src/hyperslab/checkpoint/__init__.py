"""Saves and loads checkpoints on any grid, keeps those that a run needs, restores its state."""
