"""Batch, group, instance, layer and local response normalisation."""

from hyperslab.ops.normalization import (
    batch_norm,
    group_norm,
    layer_norm,
    local_response_norm,
    normalize,
)

__all__ = ["batch_norm", "group_norm", "layer_norm", "local_response_norm", "normalize"]
