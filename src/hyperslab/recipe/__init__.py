"""Recipes: `schema` says what one may say, `load` reads it, `choices` gives names their meaning."""
