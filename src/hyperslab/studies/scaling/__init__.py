"""Studies scaling: the same training on more and more ranks, measured, predicted, or both."""
