"""`hyperslab recipes`."""

from hyperslab.cli.recipes.commands import recipes_commands

__all__ = ["recipes_commands"]
