"""What runs on one block and knows no rank.

A module holds one kernel: its plain reference, which tests compare the others with, and the
versions that run. Which one runs is decided in `hyperslab.ops.kernels.choose`, by device, dtype and
memory format.
"""
