"""Random epochs of the data pipeline with injected faults."""
