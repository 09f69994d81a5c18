"""Chains: normalisation, activation and pooling of a tensor in one pass, put off until needed."""
