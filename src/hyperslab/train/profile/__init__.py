"""Profiles of a few steps: what each rank does when, row by row, on one clock.

`ranges` marks what ranks wait for and which layer runs, while a profile is recorded and not
otherwise; torch's profiler takes it down with every operator; `events`, `rows` and `layers` make
the file of it that `schema` describes.
"""
