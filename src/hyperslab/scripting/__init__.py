"""Training from a program: `hyperslab.fit` and what it returns."""
