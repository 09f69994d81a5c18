"""Reads and writes arrays in HDF5, Zarr and numpy files, with tables of targets.

`open` finds an array in a file, `layouts` knows published data sets. Three sources read folders:
`keyed` of HDF5 or Zarr in known layouts, `npy` of numpy's files, `mapped` wherever a `DataMap`
says, of what `scan` and `table` have found.
"""
