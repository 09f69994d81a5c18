"""Holds what every layer uses: files, documents, processes, and the private names of torch."""
