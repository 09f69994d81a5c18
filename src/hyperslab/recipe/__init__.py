"""Reads recipes: `schema` says what one may write, `load` reads it and says what is wrong.

`instantiate` makes the objects that a recipe names, `compare` tells two recipes apart.
"""
