"""Trains a network from a recipe, evaluates it and predicts with it.

In reading order: `run` is one training; `builders` make its data and, with `network`,
`objective` and `optimizer`, all that a step needs; `trainer` is the loop, and the ranks vote on
each `step`; `history`, `loggers` and `mlperf` are what it writes, `profile` and `profiler` where
its time goes. A trained network is measured by `evaluate`, with `metrics`, and used by
`predict`, both of whole volumes or in `sliding_windows`.
"""
