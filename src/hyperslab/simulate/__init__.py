"""Makes data to train on: N-body universes (the extra `universe`) and CT phantoms (`medical`)."""
