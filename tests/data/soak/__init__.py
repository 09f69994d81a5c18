"""The soak: random epochs of the data pipeline with injected faults (see `__main__`)."""
