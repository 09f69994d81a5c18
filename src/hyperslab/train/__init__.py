"""From a recipe to a trained network: the loop, in reading order.

`run` builds everything (with `build` and `optimizers`), `trainer` steps through the data, the ranks
agree on each step by `step_vote` and end at a `stop_request`, `reporter` writes the `history`.
"""
