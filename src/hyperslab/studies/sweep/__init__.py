"""Sweeps over variants of a recipe, each at its best of several learning rates, with seeds."""
