"""N-body universes in the public HDF5 layout, made with `jaxpm` (the extra `universe`)."""

from hyperslab.universe.parameters import NAMES, PARAMETERS, Parameter
from hyperslab.universe.simulate import simulate

__all__ = ["NAMES", "PARAMETERS", "Parameter", "simulate"]
