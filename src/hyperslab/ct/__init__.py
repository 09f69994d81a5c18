"""CT volumes: NIfTI files in one orientation and on one lattice (the extra `medical`)."""
