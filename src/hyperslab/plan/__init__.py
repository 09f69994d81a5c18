"""Which grid: all that are legal for a number of ranks, ranked by the time of a step.

`job` is what a recipe asks of any grid, `grids` and `rough` what there is to choose from, `search`
the choice, `advice` what else would help, `show`, `figure` and `document` how it is said.
"""
