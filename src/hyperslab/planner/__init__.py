"""Plans runs before they start, from a traced step and the description of a machine.

`job` is what a recipe asks of any grid, `grids` what there is to choose from, `search` the
choice, `auto` the choice for a recipe that says `grid: auto`, `summary` how a plan is shown.
`trace` records the step of one rank, `machine` estimates its operators and messages, `cost`
sums them up to seconds and bytes, `calibrate` measures a machine.
"""
