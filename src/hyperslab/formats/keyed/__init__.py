"""HDF5 and Zarr, files of named arrays: one `source`, one `writer`, an opener for each library."""
