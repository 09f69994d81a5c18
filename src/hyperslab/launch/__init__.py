"""Starting ranks: by this machine's own launcher, or by taking the place that Slurm gives."""
