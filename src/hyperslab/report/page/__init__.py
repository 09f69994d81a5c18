"""The page: what it is made of, and the templates that draw it."""
