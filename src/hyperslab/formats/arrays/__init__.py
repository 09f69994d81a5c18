"""Reads and writes arrays in HDF5, Zarr and numpy files, with tables of targets.

The way of a scan: `layouts` knows published data sets and scans those with known keys, `scan`
looks at all others, where a `DataMap` or a table beside them says so, and finds their targets. The
way of a box: `source` asks `open` for it, which reads from HDF5 (checked by `hdf5`),
Zarr (`zarr_bounded`) or numpy's files. `writer` writes what they read.
"""
