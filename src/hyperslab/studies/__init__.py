"""Studies finished and planned runs: reports and comparisons, sweeps, scaling studies."""
