"""Networks as plain torch modules: nothing here knows that a volume may be cut."""

from hyperslab.models.cosmoflow import CosmoFlow

__all__ = ["CosmoFlow"]
