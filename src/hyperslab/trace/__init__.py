"""A step of a network, run without data: what every rank would compute, send and keep."""
