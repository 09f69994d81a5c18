"""Reads and writes NIfTI, CT volumes with labels in one orientation (the extra `medical`)."""
