"""Starting ranks: by this machine's own launcher, or with the ranks that Slurm numbers."""
