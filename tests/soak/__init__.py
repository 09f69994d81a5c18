"""Campaigns of random faults, for as long as wanted: `make soak MINUTES=60` (see `__main__`)."""
