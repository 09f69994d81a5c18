"""The fused kernels in C, compiled at their first use and called through ctypes.

``forward.c``, ``backward.c`` and ``reorder.c`` are plain C11 on rows of numbers; they know neither
torch nor Python. `compiler` runs the system's compiler, `cache` keeps what it made in the user's
cache folder, `library` loads it, `blocks` says in C's words how a tensor lies in memory, and
`chains`, `sums` and `transposition` are the operators. Each falls back to its plain reference: for
tensors that the C code does not take, and for all of them where nothing can be compiled. Why it
cannot is logged once. ``HYPERSLAB_COMPILE=0`` in the environment asks for the references.
"""
