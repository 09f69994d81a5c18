"""NIfTI: CT volumes with labels, in one orientation and on one lattice (the extra `medical`)."""
