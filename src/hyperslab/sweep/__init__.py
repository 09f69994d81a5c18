"""Sweeps: variants of a recipe, each at the best of several learning rates, with several seeds."""
