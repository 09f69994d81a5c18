"""Starts ranks by this machine's own launcher, and puts jobs back into Slurm's queue."""
