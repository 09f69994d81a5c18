"""Makes data to train on: N-body universes, and CT phantoms (the extra `medical`)."""
