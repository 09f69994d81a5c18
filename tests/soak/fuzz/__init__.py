"""Random changes of files that hyperslab reads: `make fuzz` (see `__main__`)."""
