"""The recipes that come along; `files/` is a link to those of the repository."""

from hyperslab.recipe.shipped.copies import copy_recipe, shipped_recipes

__all__ = ["copy_recipe", "shipped_recipes"]
