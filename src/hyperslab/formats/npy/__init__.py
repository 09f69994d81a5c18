"""numpy's .npy files, one a sample, with a table of targets."""
