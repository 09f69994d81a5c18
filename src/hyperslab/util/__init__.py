"""Holds what every layer uses and torch is not needed for, from files to worker processes."""
