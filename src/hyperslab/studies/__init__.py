"""Holds what is done with whole runs: made by a program, compared, swept, scaled, reported."""
