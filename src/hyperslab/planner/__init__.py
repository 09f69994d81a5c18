"""Plans runs before they start, from a traced step and the description of a machine.

`job` is what a recipe asks of any grid, `search` finds the best grid, `auto` takes it for a recipe
that says `grid: auto`, `summary` shows a plan. `trace` runs the step of one rank without memory and
writes `records`, `machine` says how long each takes, by its `calls`, `cost` sums them up to seconds
and bytes. `calibrate` measures a machine, by `timing`.
"""
