"""Evaluation: a trained network on a split that it never saw, by its kind of target."""
