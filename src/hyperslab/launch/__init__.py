"""Starting ranks by this machine's own launcher, and jobs that go back into Slurm's queue."""
