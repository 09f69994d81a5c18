"""Shared memory between the ranks of one machine: a `segment` of it, and `channels` in it."""
