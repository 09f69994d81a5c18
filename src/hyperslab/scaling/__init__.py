"""Scaling studies: the same training on more and more ranks, measured, predicted, or both.

`points` says on which grids and with which mini-batches, `measure` trains on each of them, `study`
makes throughput, speed-up and efficiency of the times, `tables` and `figure` show them.
"""
