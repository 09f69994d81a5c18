"""Classes of anybody's that a recipe names: their section, their arguments, how they are made."""
