"""Parts of a training that a recipe may name by target, or a program hand in."""
