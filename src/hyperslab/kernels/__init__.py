"""Computes operators on one block, without any rank: one module an operator.

A module holds the plain reference, which tests compare the others with, and the versions that
run. `registry` alone decides which one runs, by device, dtype and memory format. `compile`
builds the sources of `csrc`; `conv` has the convolution, `cuda` the versions in Triton.
"""
