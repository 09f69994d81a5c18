"""Recipes: `schema` says what one may write, `load` reads it, `explain` says what is wrong."""
