"""The fused kernels in C, compiled at their first use and called through ctypes.

The files in C11 work on rows of numbers, ``statistics.c`` on those of channels; they know neither
torch nor Python. `compiler` runs the system's compiler, `cache` keeps what it made in the user's
cache folder, `library` loads it, `plans` says in C's words how a tensor lies in memory, and
`chains`, `sums`, `numbers` and `transposition` are the operators. Each falls back to its plain
reference: for tensors that the C code does not take, and for all of them where nothing can be
compiled. Why it cannot is logged once. ``HYPERSLAB_COMPILE=0`` in the environment asks for the
references.
"""
